"""SGLang's kernel package, with the operations that n-gram speculation needs on a CPU."""

from absent import fill, uncallable

from sgl_kernel import _attention as _attention  # registers its operations with torch
from sgl_kernel._slots import (
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from sgl_kernel._tree import verify_tree_greedy_cpu

__all__ = [
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.0.0"

fill(__name__, uncallable)
