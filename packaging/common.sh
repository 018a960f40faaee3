# Sourced by install.sh and uninstall.sh: where things go, and how commands are run or only shown.
# shellcheck shell=sh disable=SC2034
# Set by the caller: mode (system or user), dry_run (yes or no). DESTDIR: everything goes below it, and neither users nor
# services of this machine are touched.

DESTDIR=${DESTDIR:-}

say() {
    printf '%s\n' "$*"
}

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

run() {
    if [ "$dry_run" = yes ]; then
        say "would run: $*"
    else
        "$@"
    fi
}

set_places() {
    if [ "$mode" = user ]; then
        : "${HOME:?is not set}"
        prefix=$HOME/.local/lib/inferd
        command_link=$HOME/.local/bin/inferd
        unit_dir=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
        config_dir=${XDG_CONFIG_HOME:-$HOME/.config}/inferd
        data_dir=${XDG_DATA_HOME:-$HOME/.local/share}/inferd
        cache_dir=${XDG_CACHE_HOME:-$HOME/.cache}/inferd
        unit_source=inferd-user.service
    else
        prefix=/opt/inferd
        command_link=/usr/local/bin/inferd
        unit_dir=/usr/local/lib/systemd/system
        config_dir=/etc/inferd
        data_dir=/var/lib/inferd
        cache_dir=/var/cache/inferd
        unit_source=inferd.service
    fi
    sysusers_conf=/usr/local/lib/sysusers.d/inferd.conf
    tmpfiles_conf=/usr/local/lib/tmpfiles.d/inferd.conf
}

ctl() {
    if [ "$mode" = user ]; then
        systemctl --user "$@"
    else
        systemctl "$@"
    fi
}

# Whether this machine's users and services are to be touched.
is_live() {
    [ -z "$DESTDIR" ]
}

has_systemd() {
    is_live && [ -d /run/systemd/system ]
}

require_rights() {
    if [ "$mode" = system ] && is_live && [ "$dry_run" = no ] && [ "$(id -u)" -ne 0 ]; then
        fail "the system's service needs root: use sudo, or --user for a service of your own"
    fi
    if [ "$mode" = user ] && is_live && [ "$(id -u)" -eq 0 ] && [ -n "${SUDO_USER:-}" ]; then
        fail "--user installs for whoever runs it: run it without sudo"
    fi
}
