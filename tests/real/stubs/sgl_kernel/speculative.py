"""Where SGLang looks for the tree operation that is not a CPU operation by name."""

from sgl_kernel._tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
