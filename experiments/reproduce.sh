#!/usr/bin/env bash
# experiments/reproduce.sh                    every experiment, with the time its README expects
# experiments/reproduce.sh NAME [arguments]   say what is expected, run it (arguments go to its program), then print its report, whether its
#                                             headline numbers lie inside (exit code 1 if one does not), and how much changed;
#                                             in a copy without lines, outputs/reproduced/NAME: started again, it goes on there
# PYTHON: the interpreter, python by default; in a checkout PYTHON=.venv/bin/python
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python}
case $python in */*) python=$(cd "${OLDPWD:-.}" && realpath -s "$python") ;; esac

command_of() { # the Command paragraph of a README: needs and minutes are in its first line
  sed -n '/^\*\*Command/,/^\*\*Result/p' "$1/README.md" | sed '/^\*\*Result/d'
}

minutes_of() {
  command_of "$1" | tr '\n' ' ' | grep -oE '((about|less than) )?([0-9]+|a) (minutes?|hours?)|hours' | head -n 1 || true
}

if [ $# -eq 0 ]; then
  for folder in */; do
    name=${folder%/}
    [ -f "$name/README.md" ] || continue
    minutes=$(minutes_of "$name")
    printf '%-20s %-18s %s\n' "$name" "${minutes:-see its README}" "$(sed -n '1s/^# //p' "$name/README.md")"
  done
  exit 0
fi

name=$1
shift
if [ ! -f "$name/README.md" ]; then
  echo "there is no experiment $name; experiments/reproduce.sh lists them" >&2
  exit 2
fi
command_of "$name"
"$python" check.py expected --list "$name"
if [ ! -f "$name/run.py" ] && ! grep -qs '^methods:' "$name"/*.yaml; then
  echo "$name has no program: its commands stand above" >&2
  exit 2
fi
copy=../outputs/reproduced/$name # without its lines: what is there counts as done
mkdir -p "$copy"
export GNNPAR_DATA=${GNNPAR_DATA:-$(realpath -m ../../shared/data)}
"$python" -c 'import study, pathlib, sys; study.copied(pathlib.Path(sys.argv[1]))' "$copy"
"$python" "$copy/experiments/study.py" run "$name" "$@"
report=$("$python" "$copy/experiments/study.py" report "$name")
echo "$report"
outside=0
"$python" check.py expected "$name" <<<"$report" || outside=1
changed=$(grep '^|' <<<"$report" | grep -cvxFf <(cat "$name"/*.md) || true)
echo "$changed lines of these tables differ from those of its pages; lines and figures lie in outputs/reproduced/$name/experiments/$name"
exit $outside
