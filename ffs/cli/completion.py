"""`ffs completion bash|zsh`: a script that completes verbs, options, values and paths of the cluster.

What the parser knows stands in the script; for paths it runs `ffs __complete`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator

from ffs.cli.grammar import Grammar, Value, Verb, read_grammar
from ffs.cli.parsing import Commands, command


def add_commands(commands: Commands) -> None:
    words = "a script for the completion of bash or zsh: source <(ffs completion bash)"
    parser = command(commands, "completion", run_completion, words)
    parser.add_argument("shell", choices=("bash", "zsh"))


def run_completion(args: argparse.Namespace) -> int:
    from ffs.cli import build_parser

    grammar = read_grammar(build_parser())
    print({"bash": bash_script, "zsh": zsh_script}[args.shell](grammar), end="")
    return 0


def _cases(function: str, argument: str, rows: Iterator[tuple[str, str]]) -> str:
    """A shell function that prints a line of words by what it is asked for."""
    lines = [f"{function}() {{", f"    case {argument} in"]
    lines += [f"        {shlex.quote(key)}) echo {shlex.quote(words)} ;;" for key, words in rows if words]
    return "\n".join([*lines, "    esac", "}", ""])


def tables(grammar: Grammar) -> str:
    """The grammar as four shell functions, for bash and zsh alike. Pure."""

    def rows(of: Callable[[Verb], str]) -> Iterator[tuple[str, str]]:
        return ((" ".join(name), of(verb)) for name, verb in grammar.items())

    values = (
        (f"{' '.join(name)} {option}".strip(), _value_words(value))
        for name, verb in grammar.items()
        for option, value in verb.options.items()
        if value is not None
    )
    return "\n".join(
        [
            _cases("_ffs_verbs", '"$1"', rows(lambda verb: " ".join(verb.verbs))),
            _cases("_ffs_options", '"$1"', rows(lambda verb: " ".join(verb.options))),
            _cases("_ffs_operands", '"$1"', rows(lambda verb: " ".join(verb.choices) or f"@{verb.kind}")),
            _cases("_ffs_values", '"$1"', values),
        ]
    )


def _value_words(value: Value) -> str:
    return " ".join(value.choices) or f"@{value.kind}"


_HEAD = """# Completion of ffs for {shell}, made by `ffs completion {shell}`.
# {where}

"""

# Both scripts go through the words before the cursor as grammar.offer does.
_WALK = """
# Sets verb, awaits (what the last option wants, or nothing) and cluster from the words before the cursor.
_ffs_walk() {
    local word sub
    verb= awaits= cluster=
    for word in "$@"; do
        if [[ -n $awaits ]]; then
            [[ $awaits == "@cluster" ]] && cluster=$word
            awaits=
        elif [[ $word == --cluster ]]; then
            awaits=@cluster
        elif [[ $word == -* ]]; then
            awaits=$(_ffs_values "${verb:+$verb }$word")
            [[ -z $awaits ]] && awaits=$(_ffs_values "$word")
        else
            sub=" $(_ffs_verbs "$verb") "
            [[ $sub == *" $word "* ]] && verb=${verb:+$verb }$word
        fi
    done
}

# What the word under the cursor may be: words, or @ and the kind of a path.
_ffs_offer() {
    if [[ -n $awaits ]]; then
        echo "$awaits"
    elif [[ $1 == -* ]]; then
        _ffs_options "$verb"
    elif [[ -n $(_ffs_verbs "$verb") ]]; then
        _ffs_verbs "$verb"
    else
        _ffs_operands "$verb"
    fi
}

_ffs_remote() {
    if [[ -n $cluster ]]; then
        command ffs __complete --cluster "$cluster" -- "$1" 2>/dev/null
    else
        command ffs __complete -- "$1" 2>/dev/null
    fi
}
"""

_BASH = """
_ffs_local() {
    local name
    compgen -f -- "$1" | while IFS= read -r name; do
        if [[ -d $name ]]; then echo "$name/"; else echo "$name"; fi
    done
}

_ffs() {
    local verb awaits cluster cur typed offered name prefix
    local -a words
    local IFS=$' \\t\\n'
    # COMP_WORDS is cut at ':' too, which stands in ffs:/path: the line is cut here, at blanks.
    read -a words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:COMP_POINT-1:1} == [[:space:]] ]] && words+=("")
    typed=${words[${#words[@]}-1]}
    cur=${typed#[\\"\\']}
    _ffs_walk "${words[@]:1:${#words[@]}-2}"
    offered=$(_ffs_offer "$cur")
    COMPREPLY=()
    # Of a word that is cut at ':', bash replaces what stands after the last one.
    prefix=
    [[ $cur == *:* && $COMP_WORDBREAKS == *:* ]] && prefix=${cur%"${cur##*:}"}
    while IFS= read -r name; do
        [[ $name == "$cur"* ]] || continue
        name=${name#"$prefix"}
        # Inside quotes too, nothing of a name may be taken for a command.
        case $typed in
            \\"*) name=${name//\\\\/\\\\\\\\} name=${name//\\"/\\\\\\"} name=${name//\\$/\\\\\\$}
                 name=${name//\\`/\\\\\\`} ;;
            \\'*) name=${name//\\'/\\'\\\\\\'\\'} ;;
            *) printf -v name %q "$name" ;;
        esac
        [[ $name == */ || $name == ffs: ]] || name+=" "
        COMPREPLY+=("$name")
    done < <(
        case $offered in
            @remote) _ffs_remote "$cur" ;;
            @local) _ffs_local "$cur" ;;
            @mixed) _ffs_local "$cur"; [[ $cur == /* || $cur == ffs:* ]] && _ffs_remote "$cur" ;;
            @either)
                if [[ $cur == ffs:* ]]; then _ffs_remote "$cur"; else _ffs_local "$cur"; echo ffs:/; fi ;;
            @*) ;;
            *) printf '%s\\n' $offered ;;
        esac
    )
}
complete -o nospace -F _ffs ffs
"""

_ZSH = """
_ffs_paths() {
    local -a found folders files
    found=("${(@f)$(_ffs_remote "$1")}")
    folders=(${(M)found:#*/}) files=(${found:#*/})
    (( $#folders )) && compadd -Q -S '' -- ${(q)folders}
    (( $#files )) && compadd -Q -- ${(q)files}
}

_ffs() {
    local verb awaits cluster cur=${(Q)words[CURRENT]} offered
    _ffs_walk ${(Q)words[2,CURRENT-1]}
    offered=$(_ffs_offer "$cur")
    case $offered in
        @remote) _ffs_paths "$cur" ;;
        @local) _files ;;
        @mixed) _files; [[ $cur == /* || $cur == ffs:* ]] && _ffs_paths "$cur" ;;
        @either) if [[ $cur == ffs:* ]]; then _ffs_paths "$cur"; else _files; compadd -S '' -- ffs:/; fi ;;
        @*|'') ;;
        *) compadd -- ${=offered} ;;
    esac
    return 0
}
compdef _ffs ffs
"""


def bash_script(grammar: Grammar) -> str:
    """The whole script for bash. Pure."""
    where = "In ~/.bashrc: source <(ffs completion bash)"
    return _HEAD.format(shell="bash", where=where) + tables(grammar) + _WALK + _BASH


def zsh_script(grammar: Grammar) -> str:
    """The whole script for zsh. Pure."""
    where = "In ~/.zshrc, after compinit: source <(ffs completion zsh)"
    return _HEAD.format(shell="zsh", where=where) + tables(grammar) + _WALK + _ZSH
