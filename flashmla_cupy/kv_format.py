"""The two FP8 layouts of the KV cache, byte by byte. Every size of theirs is computed here (and in
cuda_src/common/kv_format.cuh, which a unit test holds to this file).

A cache is uint8 of shape (pages, page_size, 1, bytes_per_token). A page is one run of bytes; pages may lie any distance
apart. Both layouts keep `d_nope` values of a token as e4m3 codes, with a scale for each `tile` of them, and `d_rope`
values as bfloat16.

V32    token by token: 512 codes | 4 float32 scales | 64 bfloat16
D512   rows of all tokens: 448 codes | 64 bfloat16; then, behind the last row, 8 bytes a token: 7 ue8m0 scales | unused
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
MIN_SCALE = 2.0**-126  # the smallest normal float32: no scale is subnormal


@dataclass(frozen=True)
class KVFormat:
    """One layout. Offsets and strides are in bytes."""

    name: str
    d_nope: int  # values of a token kept as e4m3
    d_rope: int  # values of a token kept as bfloat16
    tile: int  # values that share a scale
    scale: Literal["float32", "ue8m0"]
    scale_bytes: int  # of one token's scales, with what is unused
    scales_in_row: bool  # scales lie between a token's codes and RoPE; else behind the rows of all tokens of the page
    page_multiple: int  # allocated pages are a multiple of this

    @property
    def d_qk(self) -> int:
        return self.d_nope + self.d_rope

    @property
    def tiles(self) -> int:
        """Scales of a token."""
        return self.d_nope // self.tile

    @property
    def bytes_per_token(self) -> int:
        return self.d_nope + 2 * self.d_rope + self.scale_bytes

    @property
    def row_bytes(self) -> int:
        """From a token's codes to the next token's."""
        return self.bytes_per_token if self.scales_in_row else self.bytes_per_token - self.scale_bytes

    @property
    def rope_offset(self) -> int:
        """Of a token's RoPE values in its row."""
        return self.row_bytes - 2 * self.d_rope

    def scale_offset(self, page_size: int) -> int:
        """Of the first token's scales in a page of `page_size` tokens."""
        return self.d_nope if self.scales_in_row else page_size * self.row_bytes

    @property
    def scale_stride(self) -> int:
        """From a token's scales to the next token's."""
        return self.row_bytes if self.scales_in_row else self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """From a page to the next where nothing else lies between them."""
        return -(-page_size * self.bytes_per_token // self.page_multiple) * self.page_multiple


V32 = KVFormat("v32", d_nope=512, d_rope=64, tile=128, scale="float32", scale_bytes=16, scales_in_row=True,
               page_multiple=1)  # 656 bytes a token
D512 = KVFormat("d512", d_nope=448, d_rope=64, tile=64, scale="ue8m0", scale_bytes=8, scales_in_row=False,
                page_multiple=576)
FORMATS = {layout.name: layout for layout in (V32, D512)}
