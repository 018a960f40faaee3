#!/bin/sh
# Installs inferd from this source tree as a service. Running it again upgrades: what is right already is left alone,
# and the configuration is never written over.
set -eu
umask 022

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
source_tree=$(dirname -- "$here")
# shellcheck source=packaging/common.sh
. "$here/common.sh"

usage() {
    cat <<END
install.sh [--user] [--dry-run] [--no-start] [--venv DIR] [--python PROGRAM]
  --user            a service of yours alone, below ~/.local; otherwise the system's, below /opt/inferd (needs root)
  --dry-run         say what would be done
  --no-start        install, but neither enable nor start the service
  --venv DIR        take this virtual environment, in which inferd is installed, instead of making one
  --python PROGRAM  Python 3.11 to 3.13 to make the virtual environment with (python3)
DESTDIR=DIR puts all files below DIR and leaves users and services of this machine alone.
END
}

mode=system dry_run=no start=yes venv='' python=python3 changed=no
while [ $# -gt 0 ]; do
    case $1 in
    --user) mode=user ;;
    --dry-run) dry_run=yes ;;
    --no-start) start=no ;;
    --venv) shift && venv=${1:?--venv needs a folder} ;;
    --python) shift && python=${1:?--python needs a program} ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

# put_file SOURCE TARGET MODE: writes the target unless it is the same already.
put_file() {
    target=$DESTDIR$2
    if [ -f "$target" ] && cmp -s "$1" "$target"; then
        return
    fi
    say "writing $target"
    run mkdir -p "$(dirname -- "$target")"
    run install -m "$3" "$1" "$target.new"
    run mv -f "$target.new" "$target"
    changed=yes
}

check_python() {
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
        fail "inferd runs on Python 3.11 to 3.13, and $python is none of them; name one with --python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"
}

# Without a card everything works on the processor; with one, its driver must fit the torch that is installed.
report_gpu() {
    root=${PROBE_ROOT:-}
    version_file=$root/proc/driver/nvidia/version
    if [ -r "$version_file" ]; then
        version=$(sed -n 's/^NVRM version:.*[[:space:]]\([0-9][0-9]*\)\.[0-9.]*[[:space:]].*/\1/p' "$version_file")
        if [ "${version:-0}" -ge 580 ]; then
            say "NVIDIA driver $version: fine"
        else
            say "NVIDIA driver ${version:-of unknown version}: too old for CUDA 13, which torch is built with; install 580 or newer"
        fi
        [ -e "$root/dev/nvidia-uvm" ] || say "/dev/nvidia-uvm is missing: run nvidia-modprobe -c 0 -u, or start nvidia-persistenced"
        return
    fi
    for device in "$root"/sys/bus/pci/devices/*; do
        if [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ]; then
            case $(cat "$device/class" 2>/dev/null) in
            0x03*)
                say "an NVIDIA card is here, but no driver: install 580 or newer and reboot; until then the processor is used"
                return
                ;;
            esac
        fi
    done
    say "no NVIDIA card: models run on the processor"
}

make_environment() {
    if [ -n "$venv" ]; then
        [ -x "$venv/bin/inferd" ] || fail "$venv has no bin/inferd: install inferd into it first"
        if [ "$mode" = system ] && is_live; then
            case $venv in
            /home/* | /root/* | /run/user/*) fail "the service cannot see $venv: ProtectHome hides it; use a folder elsewhere" ;;
            esac
        fi
        return
    fi
    check_python
    venv=$prefix
    if [ ! -x "$DESTDIR$venv/bin/python" ]; then
        say "making the virtual environment $DESTDIR$venv"
        run "$python" -m venv "$DESTDIR$venv"
    fi
    say "installing inferd into $DESTDIR$venv; torch alone is hundreds of megabytes"
    if [ "$dry_run" = no ]; then
        build=$(mktemp -d) # a build leaves files behind, and the source tree may be somebody else's
        trap 'rm -rf "$build"' EXIT
        for name in appliance engine kernels tui webui pyproject.toml README.md; do
            cp -R "$source_tree/$name" "$build/"
        done
        "$DESTDIR$venv/bin/pip" install --quiet --upgrade --constraint "$source_tree/constraints.txt" "$build"
    fi
    changed=yes
}

make_user() {
    put_file "$here/systemd/inferd.sysusers" "$sysusers_conf" 644
    put_file "$here/systemd/inferd.tmpfiles" "$tmpfiles_conf" 644
    if ! is_live; then
        return
    fi
    if command -v systemd-sysusers >/dev/null; then
        run systemd-sysusers "$sysusers_conf"
    elif ! id inferd >/dev/null 2>&1; then
        run groupadd --system --force video
        run groupadd --system --force render
        run useradd --system --user-group --home-dir /var/lib/inferd --shell /usr/sbin/nologin --groups video,render inferd
    fi
    if command -v systemd-tmpfiles >/dev/null; then
        run systemd-tmpfiles --create "$tmpfiles_conf"
    fi
}

write_config() {
    if [ -e "$DESTDIR$config_dir/inferd.toml" ]; then
        say "keeping $DESTDIR$config_dir/inferd.toml"
        return
    fi
    config=$(mktemp)
    if [ "$mode" = system ]; then # commands on this machine read it too: they must find the same library and sockets
        sed -e 's|^#home = .*|home = "/var/lib/inferd"|' -e 's|^#run_dir = .*|run_dir = "/run/inferd"|' \
            "$here/inferd.toml" >"$config"
    else
        cp "$here/inferd.toml" "$config"
    fi
    put_file "$config" "$config_dir/inferd.toml" 644
    rm -f "$config"
}

write_unit() {
    unit=$(mktemp)
    if [ "$venv" = "$prefix" ]; then
        cp "$here/systemd/$unit_source" "$unit"
    else
        sed "s|^ExecStart=.*|ExecStart=$venv/bin/inferd serve|" "$here/systemd/$unit_source" >"$unit"
    fi
    put_file "$unit" "$unit_dir/inferd.service" 644
    rm -f "$unit"
    if [ "$mode" = system ] && [ -e "$DESTDIR/etc/systemd/system/inferd.service" ]; then
        say "/etc/systemd/system/inferd.service hides the unit that was just written; systemctl edit makes a drop-in instead"
    fi
}

link_command() {
    link=$DESTDIR$command_link
    if [ -e "$link" ] && [ ! -L "$link" ]; then
        say "keeping $link, which is not a link of ours; the command is $venv/bin/inferd"
        return
    fi
    if [ "$(readlink -- "$link" 2>/dev/null || true)" != "$venv/bin/inferd" ]; then
        say "linking $link"
        run mkdir -p "$(dirname -- "$link")"
        run ln -sfn "$venv/bin/inferd" "$link"
    fi
}

start_service() {
    if ! has_systemd; then
        say "no systemd here to start it with: $venv/bin/inferd serve"
        return
    fi
    run ctl daemon-reload
    if [ "$start" = no ]; then
        return
    fi
    run ctl enable inferd.service
    if [ "$changed" = yes ] || ! ctl --quiet is-active inferd.service; then
        run ctl restart inferd.service
    fi
    if [ "$mode" = user ]; then
        say "it ends when you log out, unless: loginctl enable-linger $(id -un)"
    fi
}

set_places
require_rights
report_gpu
make_environment
if [ "$mode" = system ]; then
    make_user
fi
write_config
write_unit
link_command
start_service
if [ "$changed" = no ]; then
    say "everything was in place already"
fi
say "see how it is: systemctl$([ "$mode" = system ] || printf ' --user') status inferd; inferd doctor"
