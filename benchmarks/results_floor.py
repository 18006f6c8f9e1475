"""The floor of reading a tree: a bare walk, and msgspec's decoding of every result as our record."""

from __future__ import annotations

import os
import sys

import msgspec

from hpcbench.results.schema import RunResult


def main() -> None:
    decoder = msgspec.json.Decoder(RunResult)
    count = 0
    for folder, _, names in os.walk(sys.argv[1]):
        if "result.json" in names:
            with open(f"{folder}/result.json", "rb") as file:
                decoder.decode(file.read())
            count += 1
    print(count)


if __name__ == "__main__":
    main()
