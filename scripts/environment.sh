#!/usr/bin/env bash
# Makes a virtual environment with jaxdist in it, or leaves a finished one alone.
#   bash scripts/environment.sh FOLDER EXTRAS [PYTHON...]
# FOLDER   such as .venv
# EXTRAS   such as test, or "" for none
# PYTHON   interpreters to try; by default 3.11, 3.12, 3.13. Exit code 3 where none is there.
# A file of the folder's says what was installed from which pyproject.toml. One that was left in the
# middle of an installation is made anew: half a package looks whole to pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$1 extras=$2
shift 2

find_python() {
    local name
    for name in "$@"; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

version=$(cksum <pyproject.toml)
unfinished="$folder/.unfinished"

# Whether what is wanted was installed, by itself or within a larger set of extras.
is_finished() {
    local larger
    case $extras in
        "") larger=(base serve test dev) ;;
        serve) larger=(serve test dev) ;;
        test) larger=(test dev) ;;
        *) larger=("$extras") ;;
    esac
    for set in "${larger[@]}"; do
        if [[ $(cat "$folder/.finished-$set" 2>/dev/null) == "$version" ]]; then return 0; fi
    done
    return 1
}

exec 9>"$folder.lock"
if command -v flock >/dev/null; then flock 9; fi

if [[ ! -e $unfinished && -x $folder/bin/python ]] && is_finished; then
    exit 0
fi
if [[ -e $unfinished ]] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    candidates=("$@")
    if [[ $# == 0 ]]; then
        candidates=(python3.11 python3.12 python3.13 python3 "$HOME"/.pyenv/versions/3.1[123].*/bin/python3)
    fi
    if ! python=$(find_python "${candidates[@]}"); then
        echo "no Python 3.11, 3.12 or 3.13 with venv was found (tried: ${candidates[*]}); on Debian: apt install python3 python3-venv" >&2
        exit 3
    fi
    echo "making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder"
fi
echo "installing jaxdist${extras:+ with $extras} into $folder; the first time takes minutes"
touch "$unfinished"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
echo "$version" >"$folder/.finished-${extras:-base}"
rm "$unfinished"
