"""Data sheets of accelerators, so that programs can be compiled for them without having one.

Figures come from the public data sheets, dense (without sparsity), per device. A machine may have less: describe your
own with `dataclasses.replace(mpmd.Target.named("h100"), memory_nbytes=...)`.
"""

import dataclasses
from typing import Any, ClassVar

GB, TB = 10**9, 10**12


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator, and how devices reach each other.

    Attributes:
      name: short, for messages.
      description: the name that the device reports.
      platform: "cuda" or "tpu".
      memory_nbytes: of device memory.
      memory_bandwidth: bytes per second.
      flops: floating-point operations per second on matrix units, for bfloat16.
      flops_float32: the same for float32 operands at JAX's default precision (TF32 on NVIDIA GPUs).
      flops_float8: the same for float8 operands; 0 if matrix units have no float8, and bfloat16 is used.
      matrix_efficiency: the part of `flops` that the fastest large matrix product reaches alone, as measured.
      attention_efficiency: the part of `flops` that cuDNN's attention reaches, as measured.
      link_bandwidth: bytes per second that a device sends to others of its host (or NVLink domain).
      network_bandwidth: bytes per second that a device sends to other hosts.
      devices_per_link_domain: the number of devices joined by `link_bandwidth`.
      capability: of CUDA.
      cores: streaming multiprocessors.
      clock_ghz, l2_nbytes, shared_nbytes: clock, L2 cache, and shared memory of a multiprocessor.
    """

    name: str
    description: str
    platform: str
    memory_nbytes: int
    memory_bandwidth: float
    flops: float
    flops_float32: float
    link_bandwidth: float
    network_bandwidth: float
    devices_per_link_domain: int = 8
    capability: tuple[int, int] = (0, 0)
    cores: int = 0
    clock_ghz: float = 0.0
    l2_nbytes: int = 0
    shared_nbytes: int = 0
    flops_float8: float = 0.0
    matrix_efficiency: float = 0.6
    attention_efficiency: float = 0.52

    known: ClassVar[dict[str, "Target"]] = {}

    @classmethod
    def named(cls, name: str) -> "Target":
        """Returns one of the built-in targets.

        Raises:
          ValueError: there is none of that name.
        """
        if name.lower() not in cls.known:
            raise ValueError(f"there is no target {name!r}. Known are {', '.join(cls.known)}, or pass an mpmd.Target.")
        return cls.known[name.lower()]

    def cuda_config(self) -> str:
        """Returns the device in the form for XLA's GPU compiler: a `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        info = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": 2048,
            "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": self.shared_nbytes - 1024,
            "shared_memory_per_core": self.shared_nbytes,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "core_count": self.cores,
            "fpus_per_core": 64 if major == 8 else 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(self.memory_bandwidth),
            "l2_cache_size": self.l2_nbytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_nbytes,
        }
        fields = " ".join(f"{name}: {value}" for name, value in info.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }}"
            ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }'
            f' device_description_str: "{self.description}"'
        )


def _cuda(name: str, description: str, **figures: Any) -> None:
    Target.known[name] = Target(name, description, "cuda", **figures)


# Products alone: from the table "Maximum Achievable Matmul FLOPS" (bfloat16) in S. Bekman, Machine Learning Engineering
# (github.com/stas00/ml-engineering): 267.9 TFLOP/s on an A100, 794.5 on an H100 or H200, 1745 on a B200 (used for a
# GB200 too). cuDNN's attention: forward and backward at 8,192 tokens and heads of 128, as an H200 reached
# (`python benchmarks/gpu_plan.py kernels`), used for the others too.
_HOPPER = {
    "flops": 989.4 * TB, "flops_float32": 494.7 * TB, "flops_float8": 1978.9 * TB, "matrix_efficiency": 0.80,
    "link_bandwidth": 450 * GB, "network_bandwidth": 50 * GB,
    "capability": (9, 0), "cores": 132, "clock_ghz": 1.98, "l2_nbytes": 50 << 20, "shared_nbytes": 228 << 10,
}  # fmt: skip
_BLACKWELL = {
    "matrix_efficiency": 0.78, "link_bandwidth": 900 * GB, "network_bandwidth": 50 * GB, "memory_bandwidth": 8.0 * TB,
    "capability": (10, 0), "cores": 148, "clock_ghz": 1.965, "l2_nbytes": 126 << 20, "shared_nbytes": 228 << 10,
}  # fmt: skip
_cuda(
    "a100", "NVIDIA A100-SXM4-80GB", memory_nbytes=80 << 30, memory_bandwidth=2.039 * TB, flops=312 * TB,
    flops_float32=156 * TB, matrix_efficiency=0.86, link_bandwidth=300 * GB, network_bandwidth=25 * GB,
    capability=(8, 0), cores=108, clock_ghz=1.41, l2_nbytes=40 << 20, shared_nbytes=164 << 10,
)  # fmt: skip
_cuda("h100", "NVIDIA H100 80GB HBM3", memory_nbytes=80 << 30, memory_bandwidth=3.35 * TB, **_HOPPER)
_cuda("h200", "NVIDIA H200", memory_nbytes=141 * GB, memory_bandwidth=4.8 * TB, **_HOPPER)
_cuda(
    "b200", "NVIDIA B200", memory_nbytes=180 * GB, flops=2250 * TB, flops_float32=1125 * TB, flops_float8=4500 * TB,
    **_BLACKWELL,
)  # fmt: skip
_cuda(
    "gb200", "NVIDIA GB200", memory_nbytes=186 * GB, flops=2500 * TB, flops_float32=1250 * TB, flops_float8=5000 * TB,
    devices_per_link_domain=72, **_BLACKWELL,
)  # fmt: skip
for _name, _kind, _memory, _bandwidth, _flops, _link in (
    ("v5e", "TPU v5 lite", 16 << 30, 0.819 * TB, 197 * TB, 200 * GB),
    ("v5p", "TPU v5", 95 << 30, 2.765 * TB, 459 * TB, 600 * GB),
):
    Target.known[_name] = Target(
        _name, _kind, "tpu", _memory, _bandwidth, _flops, _flops / 2, _link, 25 * GB,
        devices_per_link_domain=256 if _name == "v5e" else 8960,
    )  # fmt: skip
