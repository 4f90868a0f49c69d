"""A weight matrix and its product.

On the CPU our own kernels compute each row alone, so a row's bits depend on no other row. On a GPU the library picks a
kernel by the number of rows, so steps are padded to row counts that a self-test found batch-invariant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from tokenteller.model.config import Storage
from tokenteller.model.kernels import Panels, multiply
from tokenteller.model.packing import DTYPES, Matrix, as_tensor, pack, unpack


class StorageError(ValueError):
    """A device or weight format that this machine does not have."""


# Row counts that the self-test tries; a step is padded up to one that passed.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 30, 32, 36, 40, 48, 64, 72, 96, 128, 160, 192, 256)


class Linear:
    """y [N, out] = x [N, in] @ weight.T + bias; x and y in fp32 whatever the weight format.

    On a GPU x is rounded to the weight's type first.
    """

    def __init__(
        self,
        weight: Matrix | Sequence[Matrix],
        storage: Storage = "fp32",
        bias: torch.Tensor | None = None,
        device: str = "cpu",
    ) -> None:
        """Several matrices [out, in] are stacked on top of each other."""
        parts = weight if isinstance(weight, Sequence) else [weight]
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])  # [out, in]
        self.device = device
        self.panels: Panels | None = None
        if device == "cpu":
            self.panels = pack(parts, storage, bias)
        else:
            self._bias = None if bias is None else bias.to(device, torch.float32)
            self._weight = torch.cat([as_tensor(part).to(device, DTYPES[storage]) for part in parts])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.panels is None:
            y = F.linear(x.to(self._weight.dtype), self._weight).float()
            return y if self._bias is None else y + self._bias
        y = x.new_empty(x.shape[0], self.shape[0])
        multiply(x.numpy(), self.panels, y.numpy(), False)
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """weight[ids] in fp32, [N, in], so that an embedding tied to the head needs no memory of its own."""
        if self.panels is None:
            return self._weight[ids].float()
        return torch.from_numpy(unpack(self.panels, ids.numpy(), self.shape[1]))


def check_storage(storage: Storage, device: str) -> None:
    """Raises StorageError for a device that is missing or cannot multiply in this weight format."""
    if device == "cuda" and not torch.cuda.is_available():
        built = "finds no such device" if torch.version.cuda else "is built without it"
        raise StorageError(f"--device cuda: this torch ({torch.__version__}) {built}")
    if storage in ("int8", "int4") and device != "cpu":
        raise StorageError(f"--weights {storage}: only on the CPU, not on {device}; use --weights fp16")


def find_safe_rows(linears: Iterable[Linear], max_rows: int) -> tuple[int, ...]:
    """Batch-invariant row counts: each row's result has the same bits at any place and beside any other rows.

    Found by multiplying every shape at each candidate size and comparing with the same rows in one large product.
    Ascending; the last is the large product's own size, at least max_rows.
    """
    unique = {linear.shape: linear for linear in linears}
    largest = max(64, -(-max_rows // 32) * 32)
    sizes = [rows for rows in _CANDIDATES if rows < max_rows]
    for linear in unique.values():
        x = torch.randn(largest, linear.shape[1], generator=torch.Generator().manual_seed(1)).to(linear.device)
        reference = linear(x)
        sizes = [rows for rows in sizes if _same_bits(linear, x, reference, rows)]
    return (*sizes, largest)


def _same_bits(linear: Linear, x: torch.Tensor, reference: torch.Tensor, rows: int) -> bool:
    """Whether the first and the last `rows` rows of x [M, in] alone give those rows of reference [M, out]."""
    front = torch.equal(linear(x[:rows].contiguous()), reference[:rows])
    return front and torch.equal(linear(x[-rows:].contiguous()), reference[-rows:])


def padded(rows: int, safe: tuple[int, ...]) -> int:
    """The smallest safe row count >= `rows`, beyond the largest a multiple of it. With an empty `safe` any will do."""
    if not safe:
        return rows
    for size in safe:
        if size >= rows:
            return size
    largest = safe[-1]
    return -(-rows // largest) * largest
