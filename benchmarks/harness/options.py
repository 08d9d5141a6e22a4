"""Command-line options that every measuring program has."""

import argparse
from pathlib import Path

from benchmarks.harness.provenance import DATA, RESULTS


def measurement_options(text: str | None, *, data: bool = False) -> argparse.ArgumentParser:
    """Return a parser with --quick, --json and --output; with --data for programs that read recorded routes.

    text    docstring of the program
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller cases, fewer repetitions; writes no rows")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        default=RESULTS,
        help="folder for the rows; default: benchmarks/results",
    )
    if data:
        words = "folder with recorded routes; default: shared/data beside the checkout"
        parser.add_argument("--data", metavar="FOLDER", type=Path, default=DATA, help=words)
    return parser
