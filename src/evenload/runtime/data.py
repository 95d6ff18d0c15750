"""Tokens to train on: text files as bytes, or files of token numbers; batches that depend on the step alone."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.errors import EvenloadError

BYTES: Final = 256
"""Vocabulary of text that is read as bytes."""
BINARY: Final = ".bin"
"""Ending of files of token numbers: unsigned, of 16 bits, or of 32 where the vocabulary needs them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """A row of tokens."""

    numbers: NDArray[Any]
    vocabulary: int
    """Token numbers are below it."""

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(
        self, *, step: int, part: int, parts: int, sequences: int, length: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences that begin at random places, and the token after each token.

        They depend on the arguments alone: a run that is resumed sees what it would have seen.

        Args:
            step: number of the batch.
            part: which replica's share.
            parts: replicas.
            sequences: of one replica.
            length: tokens of a sequence.
            seed: of the run.

        Returns:
            [sequences, length] each.

        Raises:
            EvenloadError: a token is not in the vocabulary, in the share of whichever replica.
        """
        begins = np.random.default_rng((seed, step)).integers(0, len(self) - length, sequences * parts)
        rows = np.stack([self.numbers[begin : begin + length + 1] for begin in begins])
        if (highest := int(rows.max())) >= self.vocabulary:
            raise EvenloadError(
                f"the data has the token {highest}, and the model's vocabulary has {self.vocabulary}",
                where="--data",
                fix="use the data that was made with this model's tokenizer",
            )
        both = torch.as_tensor(rows[part * sequences : (part + 1) * sequences].astype(np.int64))
        return both[:, :-1], both[:, 1:]


def read_tokens(names: Sequence[str], *, vocabulary: int, length: int) -> Tokens:
    """The tokens of files, one after the other.

    Args:
        names: files, or patterns of files.
        vocabulary: of the model.
        length: tokens that a sequence needs.

    Raises:
        EvenloadError: no files, one that cannot be read, or too few tokens.
    """
    files = [file for name in names for file in _files(name)]
    if not files:
        raise EvenloadError("there is no data to train on", where="--data", fix="name text files, or .bin files")
    numbers = [_read(file, vocabulary) for file in files]
    whole = numbers[0] if len(numbers) == 1 else np.concatenate(numbers)
    if len(whole) < length + 2:
        raise EvenloadError(
            f"the data has {len(whole)} tokens, and one sequence needs {length + 2}",
            where="--data",
            fix="name more files, or a shorter --seq",
        )
    return Tokens(numbers=whole, vocabulary=vocabulary)


def _files(name: str) -> list[Path]:
    if any(sign in name for sign in "*?["):
        found = sorted(glob.glob(name, recursive=True))  # noqa: PTH207  # patterns may be absolute
        files = [path for path in map(Path, found) if path.is_file()]
        if not files:
            raise EvenloadError(f"no file is called {name}", where="--data", fix="check the pattern")
        return files
    return [Path(name)]


def _read(path: Path, vocabulary: int) -> NDArray[Any]:
    try:
        if path.suffix == BINARY:
            kind = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
            if (size := path.stat().st_size) % kind.itemsize or not size:
                raise EvenloadError(
                    f"the file has {size} bytes, which are no row of {kind.itemsize}-byte numbers",
                    where=str(path),
                    fix="write the token numbers again; the file may be cut off",
                )
            return np.memmap(path, dtype=kind, mode="r")
        if vocabulary < BYTES:
            raise EvenloadError(
                f"text is read as bytes, {BYTES} tokens, and the model's vocabulary has {vocabulary}",
                where=str(path),
                fix="train a model with vocab_size 256, or name a .bin file of token numbers",
            )
        return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=str(path), fix="check the path") from None
    except (OSError, ValueError) as error:
        if isinstance(error, EvenloadError):
            raise
        fix = "name a file that can be read, or a pattern such as 'texts/*.txt'"
        raise EvenloadError(f"cannot read the file: {error}", where=str(path), fix=fix) from None
