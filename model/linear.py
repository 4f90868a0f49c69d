"""How a weight matrix is stored and multiplied, and which row counts keep a row's bits apart from its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from model.config import Storage

DTYPES: dict[Storage, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class StorageError(ValueError):
    """A device or a storage that this machine does not have."""


# Row counts tried by the self-test; anything between two of them is padded up.
_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 30, 32, 36, 40, 48, 64, 72, 96, 128, 160, 192, 256)


class Linear:
    """y [N, out] = x [N, in] @ weight.T + bias; x and y in fp32 whatever the storage.

    fp32: the weight as it is. fp16 on the CPU: packed for FBGEMM, half the memory and near the machine's arithmetic
    limit from 16 rows up; a checkpoint that stores fp16 loses nothing. Else x is rounded to the storage first.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        storage: Storage = "fp32",
        bias: torch.Tensor | None = None,
        device: str = "cpu",
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])  # [out, in]
        self.storage = storage
        self.device = device
        self._bias = None if bias is None else bias.to(device, torch.float32)
        if storage == "fp16" and device == "cpu":
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), self._bias)
            self._multiply: Callable[[torch.Tensor], torch.Tensor] = self._packed_fp16
        else:
            self._weight = weight.to(device, DTYPES[storage]).contiguous()  # the same memory where it is so already
            self._multiply = self._full if storage == "fp32" else self._rounded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    def _full(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.to(self._weight.dtype), self._weight).float()
        return y if self._bias is None else y + self._bias

    def _packed_fp16(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


def check_storage(storage: Storage, device: str) -> None:
    """Raises StorageError for a device that is not there, and for bf16 on a CPU where torch only emulates it."""
    if device == "cuda" and not torch.cuda.is_available():
        built = "finds no such device" if torch.version.cuda else "is built without it"
        raise StorageError(f"--device cuda: this torch ({torch.__version__}) {built}")
    if storage == "bf16" and device == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        raise StorageError(
            "--weights bf16: this CPU has no bf16 products (AVX512-BF16 or AMX), so each would take over 100 times as "
            "long as in fp32; use --weights fp16 or fp32"
        )


def find_safe_rows(linears: Iterable[Linear], max_rows: int) -> tuple[int, ...]:
    """Row counts at which every product gives each row the same bits, whatever its place and its neighbours.

    A library picks its kernel by the number of rows, and kernels differ in the last bit. So each shape is multiplied
    at every candidate size and compared with the same rows in one large product; a step is then padded to a size that
    passed. Ascending; the last one is the large product's own size, at least max_rows.
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
    """Whether the first and the last `rows` rows of x [M, in], multiplied alone, equal those of reference [M, out]."""
    front = torch.equal(linear(x[:rows].contiguous()), reference[:rows])
    return front and torch.equal(linear(x[-rows:].contiguous()), reference[-rows:])


def padded(rows: int, safe: tuple[int, ...]) -> int:
    """The smallest safe row count that holds `rows`; a multiple of the largest beyond it."""
    for size in safe:
        if size >= rows:
            return size
    largest = safe[-1]
    return -(-rows // largest) * largest
