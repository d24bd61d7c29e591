# Sourced by other scripts: makes .venv with this project and the extras named in $EXTRAS, once,
# and puts it on the PATH. Needs Python 3.11 or newer with venv and pip.
#
#   EXTRAS=plot; source examples/make_environment.sh

make_environment() {
    local root python stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    python=${PYTHON:-python3}
    stamp="$root/.venv/installed-$(echo "$EXTRAS $root" | cat - "$root/setup.py" | cksum | cut -d' ' -f1)"
    if [ ! -e "$stamp" ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "error: $("$python" --version) is too old; set PYTHON to Python 3.11 or newer" >&2
            return 1
        }
        echo "Making the environment .venv (once; takes a minute or more) ..."
        [ -x "$root/.venv/bin/python" ] || "$python" -m venv "$root/.venv"
        "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -e "$root[$EXTRAS]" || return 1
        touch "$stamp"
    fi
    export PATH="$root/.venv/bin:$PATH"
}

make_environment
