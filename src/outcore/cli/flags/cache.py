"""The flags of ``outcore cache``."""

from __future__ import annotations

from ..arguments import add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore cache",
        example="outcore cache ls",
        description="What Outcore made once and keeps: packed copies, self drafts, calibrations, compiled kernels, "
        "marks that this machine was looked at, and what was computed of prompts. All of it is made again when it is "
        "needed; what is in use stays.",
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ls | verify | rm | clear", parser_class=ArgumentParser
    )
    shown = actions.add_parser("ls", help="Show what there is.", description="Show what there is, largest first.")
    checked = actions.add_parser(
        "verify",
        help="Read what is kept of prompts, and remove what is damaged.",
        description="Read what is kept of prompts, and remove what is damaged, which would be found when it is used, "
        "and computed again. The status is 1 if there was any.",
    )
    gone = actions.add_parser("rm", help="Remove some of it.", description="Remove some of it.")
    gone.add_argument("names", nargs="+", metavar="NAME", help="As ls shows it, or a beginning that only one has.")
    all_gone = actions.add_parser("clear", help="Remove all of it.", description="Remove all that nobody uses.")
    all_gone.add_argument("--yes", "-y", action="store_true", help="Do not ask.")
    for action in (shown, checked, gone, all_gone):
        add_output_arguments(action)
    return parser
