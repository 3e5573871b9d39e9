"""`elastipod checkpoint export`: writes the weights of a checkpoint to a file that other tools read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastipod.checkpoint.export import export_weights
from elastipod.errors import CheckpointError


def main(argv: Sequence[str]) -> int:
    """Run `elastipod checkpoint` and give the exit status: 0 success, 1 an error, 2 wrong usage."""
    options = _parser().parse_args(argv)
    try:
        done = export_weights(options.path, options.to, step=options.step, model=options.model, replace=options.force)
    except CheckpointError as error:
        print(f"elastipod checkpoint: {error}", file=sys.stderr)
        return 1
    size = f"{done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB"
    left_out = f"; not a tensor, and left out: {', '.join(done.left_out)}" if done.left_out else ""
    print(f"{done.path}: weights of step {done.step}, {size}{left_out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elastipod checkpoint", description="Use the checkpoints of a job.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser(
        "export",
        help="write the weights of a checkpoint to a safetensors file",
        description="Write the weights of a durable checkpoint, whole, to one safetensors file. Claims and changes nothing.",
    )
    export.add_argument("path", help="directory or address of the checkpoints, or the folder of one of them")
    export.add_argument("--to", required=True, metavar="FILE", help="file to write")
    export.add_argument("--step", type=int, help="step to export (default: the newest)")
    export.add_argument("--model", metavar="NAME", help="one of several models that were saved together, by its name")
    export.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser
