"""KernelSpec: the name of one kernel variant. One spec is one generated unit, one cubin, one module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """Names `cuda_src/<op>/kernel_<path>.cuh` instantiated with `Config<config...>` for one GPU architecture."""

    op: str  # "dense_decode"
    path: str  # "sm90": kernel_sm90.cuh
    config: tuple[str, ...]  # C++ template arguments, resolved inside namespace flashmla; (): Config is no template
    tag: tuple[str, ...]  # the variant's part of the name, ("bf16", "d576")
    params: str  # parameter struct, in params.py and common/params.cuh
    arch: str = "sm_90a"
    experimental: bool = False

    def __post_init__(self) -> None:
        if not self.entry.isidentifier():
            raise ValueError(f"spec: got {self.name!r}, expected op, path and tag to form an identifier")

    @property
    def name(self) -> str:
        """Shown to people: "dense_decode.sm90.bf16.d576"."""
        return ".".join((self.op, self.path, *self.tag))

    @property
    def entry(self) -> str:
        """The kernel's symbol: "dense_decode_sm90_bf16_d576"."""
        return self.name.replace(".", "_")

    @property
    def kernel_file(self) -> str:
        """Path below cuda_src."""
        return f"{self.op}/kernel_{self.path}.cuh"
