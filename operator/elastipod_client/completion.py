"""`elastipod completion SHELL`: completion of commands, options, values and names of jobs.

It is our own because kubectl asks a plugin's completer in a form of its own (a program `kubectl_complete-NAME` that prints one
candidate a line, then a directive), which libraries for argparse do not speak; the shells use the same answers.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

from .kubectl import Kubectl, KubectlError
from .observing import JOBS
from .options import OK
from .terminal import say

# kubectl's directive: offer no files beside the candidates.
NO_FILES = ":4"
SHELLS = {
    "bash": """\
_elastipod() {
    local IFS=$'\\n' last="${COMP_WORDS[COMP_CWORD]}"
    [[ $last == "=" ]] && last=""
    COMPREPLY=($(compgen -W "$(elastipod completion candidates -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" \\
        -- "$last"))
}
complete -o default -F _elastipod elastipod""",
    "zsh": """\
#compdef elastipod
_elastipod() {
    local -a found
    found=("${(@f)$(elastipod completion candidates -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -a found
}
compdef _elastipod elastipod""",
    "fish": """\
complete -c elastipod -f -a '(elastipod completion candidates -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'""",
}
CLIENT = "elastipod_client."


def parser() -> ArgumentParser:
    """Give the parser of the command."""
    found = ArgumentParser(
        prog="elastipod completion",
        description="Print a script that completes commands, options and names of jobs. Load it in your shell's startup file.",
    )
    found.add_argument("shell", choices=[*SHELLS, "candidates"], help="candidates: what the scripts call")
    found.add_argument("words", nargs="*", help="for candidates, after --: the words of the command line so far")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    args = parser().parse_args(argv)
    say(SHELLS[args.shell] if args.shell in SHELLS else "\n".join(candidates(args.words)))
    return OK


def main_for_kubectl() -> int:
    """Run as `kubectl_complete-elastipod`, which kubectl calls with the words behind `kubectl elastipod`."""
    say("\n".join([*candidates(sys.argv[1:]), NO_FILES]))
    return OK


def candidates(words: Sequence[str]) -> list[str]:
    """Give what may stand in place of the last word, which may be empty."""
    # The table of commands is the library's; this package does not depend on it, but is installed with it.
    commands: Mapping[str, object] = import_module("elastipod.cli").COMMANDS
    modules = {name: str(getattr(command, "module", "")) for name, command in commands.items()}
    return complete(words, modules, _jobs)


def complete(words: Sequence[str], modules: Mapping[str, str], jobs: Callable[[Kubectl], list[str]]) -> list[str]:
    """Give the candidates for the last word. modules: of each command. jobs: gives the names of jobs."""
    *before, last = _whole(words) or [""]
    if not before:
        return sorted(name for name in modules if name.startswith(last))
    module = modules.get(before[0], "")
    if not module.startswith(CLIENT):
        return []
    found = import_module(module).parser()
    actions = {option: action for action in found._actions for option in action.option_strings}
    wanted = actions.get(before[-1])
    if wanted is not None and wanted.nargs != 0:
        return _beginning(wanted.choices, last)
    option, equals, value = last.partition("=")
    if equals and option in actions:
        return [f"{option}={one}" for one in _beginning(actions[option].choices, value)]
    if last.startswith("-"):
        return sorted(option for option in actions if option.startswith(last))
    places = [action for action in found._actions if not action.option_strings]
    if not places or places[0].metavar != "JOB":
        return _beginning(places[0].choices if places else None, last)
    return sorted(name for name in jobs(_kubectl(before)) if name.startswith(last))


def _whole(words: Sequence[str]) -> list[str]:
    """Give the words as other shells have them: bash makes three words of --namespace=team."""
    whole: list[str] = []
    for at, word in enumerate(words):
        if word == "=" and whole and whole[-1].startswith("--"):
            if at == len(words) - 1:
                whole.append("")  # the value begins here
        else:
            whole.append(word)
    return whole


def _beginning(choices: Iterable[object] | None, start: str) -> list[str]:
    return sorted(str(one) for one in choices or () if str(one).startswith(start))


def _kubectl(words: Sequence[str]) -> Kubectl:
    """Give the way to the API server that the words so far name."""
    values: dict[str, str] = {}
    names = {"-n": "namespace", "--namespace": "namespace", "--context": "context", "--kubeconfig": "kubeconfig"}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in names:
            values[names[option]] = value if equals else next(iter(words[at + 1 :]), "")
    return Kubectl(**values)


def _jobs(kubectl: Kubectl) -> list[str]:
    try:
        return [line.rpartition("/")[2] for line in kubectl.run("get", JOBS, "-o", "name").splitlines()]
    except KubectlError:
        return []  # a completion that cannot be made says nothing
