#!/bin/sh
# Takes away what install.sh has put in place. Models, keys and the configuration stay, unless --purge is given.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
# shellcheck source=packaging/common.sh
. "$here/common.sh"

usage() {
    cat <<END
uninstall.sh [--user] [--purge] [--dry-run]
  --user     the service of yours alone; otherwise the system's (needs root)
  --purge    also the library with all models and keys, caches, the configuration, and the user inferd
  --dry-run  say what would be done
DESTDIR=DIR: all files are below DIR, and users and services of this machine are left alone.
END
}

mode=system dry_run=no purge=no
while [ $# -gt 0 ]; do
    case $1 in
    --user) mode=user ;;
    --purge) purge=yes ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

# take PATH: removes a file or a folder, if it is there.
take() {
    if [ -e "$DESTDIR$1" ] || [ -L "$DESTDIR$1" ]; then
        say "removing $DESTDIR$1"
        run rm -rf -- "$DESTDIR$1"
    fi
}

stop_service() {
    if has_systemd && ctl cat inferd.service >/dev/null 2>&1; then
        run ctl disable --now inferd.service
    fi
}

take_program() {
    take "$unit_dir/inferd.service"
    case $(readlink -- "$DESTDIR$command_link" 2>/dev/null || true) in
    */bin/inferd) take "$command_link" ;;
    esac
    if [ -f "$DESTDIR$prefix/pyvenv.cfg" ]; then # only what is an environment, whatever else may lie there
        take "$prefix"
    fi
    if [ "$mode" = system ]; then
        take "$tmpfiles_conf"
        take "$sysusers_conf"
    fi
    if has_systemd; then
        run ctl daemon-reload
    fi
}

take_data() {
    take "$data_dir"
    take "$cache_dir"
    take "$config_dir"
    if [ "$mode" = system ] && is_live && id inferd >/dev/null 2>&1; then
        run userdel inferd
    fi
}

set_places
require_rights
stop_service
take_program
if [ "$purge" = yes ]; then
    take_data
else
    say "kept: $data_dir, $cache_dir and $config_dir (--purge takes them too)"
fi
