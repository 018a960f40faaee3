"""Which rows of a decode batch share first blocks, as tensors on the card."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prefixes:
    """Groups of rows; the first `lens[g]` tokens of all rows of group g lie in the same blocks, of any row's table.

    The number of groups, and the bound, are fixed for a captured launch; the tensors may be filled anew.
    """

    lens: Tensor  # [g] i32, in tokens, whole blocks; 0 for a group that is not in use
    starts: Tensor  # [g + 1] i32, group g has rows[starts[g] : starts[g + 1]]; ascending, equal where a group is empty
    rows: Tensor  # [n] i32, the rows in order of their groups; what lies from starts[g] on is not read
    row_group: Tensor  # [n] i32, -1 for a row that shares nothing
    max_len: int  # no prefix has more tokens
