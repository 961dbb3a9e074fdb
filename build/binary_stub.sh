#!/bin/sh
# hydra, in one file: this script, and behind its last line the program as a compressed archive. build/binary.sh makes it.
#
# The first start unpacks the program to ~/.cache/hydra/bin/DIGEST; every start runs it there, in this process. So
# nothing is unpacked a second time, nothing lies in /tmp, and kill -9 leaves nothing behind. The folder appears under its
# name only when it is complete. Versions that no process runs any more are removed when a new one is unpacked.
# Needs sh, tar, gzip, tail, sync and flock: every Debian, Ubuntu, Fedora or Arch has them.
set -eu

digest=@digest@
version="@version@"     # hydra's, and for which devices
glibc_minor=@glibc_minor@         # glibc 2.this or newer
size_mb=@size_mb@             # unpacked
line=@line@                # the first of the archive

fail() {
    printf 'hydra: %s\n' "$*" >&2
    exit 71
}

file=$0
[ -f "$file" ] || file=$(command -v -- "$0") || fail "cannot find the file that I am: $0"
case $file in
    /*) ;;
    *) file=$PWD/$file ;;
esac
case ${XDG_CACHE_HOME:-} in
    /*) programs=$XDG_CACHE_HOME/hydra/bin ;;
    *)
        [ "${HOME:-}" ] || fail "neither HOME nor XDG_CACHE_HOME is set: the program is unpacked below one of them"
        programs=$HOME/.cache/hydra/bin ;;
esac
program=$programs/$digest

# Says in one sentence why the program cannot run here, instead of a loader's error or an illegal instruction.
check_box() {
    [ "$(uname -m)" = x86_64 ] || fail "this file is for x86-64, and this box is $(uname -m)"
    found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || found=""
    case $found in
        "glibc 2."*)
            found=${found#glibc 2.}
            found=${found%%[!0-9]*}
            [ "$found" -ge $glibc_minor ] ||
                fail "this box has glibc 2.$found, and 2.$glibc_minor or newer is needed: take a newer release of it" ;;
        *) fail "this box has no glibc, and 2.$glibc_minor or newer is needed" ;;
    esac
    if [ -r /proc/cpuinfo ]; then
        for flag in avx2 bmi2 f16c fma; do
            grep -qw "$flag" /proc/cpuinfo || fail "this CPU has no $flag: it is older than x86-64-v3 (Haswell, Zen)"
        done
    fi
}

unpack() {
    check_box
    for tool in flock gzip sync tail tar; do
        command -v "$tool" >/dev/null || fail "the program $tool is missing on this box"
    done
    mkdir -p "$programs" && [ -w "$programs" ] ||
        fail "$programs cannot be written: set XDG_CACHE_HOME to a folder with $size_mb MB of room"
    exec 8>"$programs/.lock"
    flock 8
    if [ ! -x "$program/hydra" ]; then # else another process has done it in the meantime
        printf 'hydra: unpacking %s (%s MB) to %s, once\n' "$version" "$size_mb" "$program" >&2
        rm -rf "$programs"/.new.* # of starts that were killed: we hold the lock
        new=$programs/.new.$$
        trap 'rm -rf "$new"' EXIT
        trap 'exit 130' INT TERM HUP
        mkdir "$new"
        tail -n "+$line" "$file" | tar -xz --no-same-owner -C "$new" ||
            fail "could not unpack: $file is damaged or not complete, or $programs has no $size_mb MB of room"
        sync -f "$new" || : # a power cut must not leave a complete name with empty files
        rm -rf "$program"
        mv "$new" "$program"
        trap - EXIT INT TERM HUP
        [ -x "$program/hydra" ] ||
            fail "$programs is on a file system that runs no programs (noexec): set XDG_CACHE_HOME to another"
        for other in "$programs"/*; do
            [ "$other" = "$program" ] || flock -n "$other" rm -rf "$other" || : # its processes hold the lock
        done
    fi
    exec 8>&-
}

[ -x "$program/hydra" ] || unpack
export _HYDRA_FILE="$file" # what `hydra service install` names; the unpacked program goes with its version
exec "$program/hydra" "$@"
exit 71
