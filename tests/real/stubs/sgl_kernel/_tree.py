"""Trees of draft tokens: their shape, and which path of one the target model agrees with.

A tree of ``n`` nodes is numbered so that a parent comes before its children; node 0 is the root, the token
that is already certain. Trees of a batch lie one after the other, so that node ``i`` of tree ``b`` is
``b * n + i``. -1 stands for no node.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reconstruct_indices_from_tree_mask(  # noqa: PLR0917  # as SGLang calls it
    mask: Tensor,
    committed_tokens: Tensor,
    positions: Tensor,
    index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    trees: int,
    nodes: int,
) -> None:
    """Fill positions and links from the ancestors of every node.

    ``mask[b, i, j]`` says that node ``j`` is ``i`` or an ancestor of it.
    """
    ancestors = mask.reshape(trees, nodes, nodes).bool().tril(-1)
    depth = ancestors.sum(-1)
    positions.copy_((depth + committed_tokens[:, None]).reshape(positions.shape))
    index.copy_(torch.arange(trees * nodes).reshape(index.shape))
    children = torch.full((trees, nodes), -1)
    siblings = torch.full((trees, nodes), -1)
    # The parent is the last of the ancestors, because parents come first.
    parents = torch.where(ancestors, torch.arange(nodes), -1).amax(-1).tolist()
    for tree in range(trees):
        last_child: dict[int, int] = {}
        for node, parent in enumerate(parents[tree]):
            if parent < 0:
                continue
            elder = last_child.get(parent)
            if elder is None:
                children[tree, parent] = node
            else:
                siblings[tree, elder] = node
            last_child[parent] = node
    first_child.copy_(children.reshape(first_child.shape))
    next_sibling.copy_(siblings.reshape(next_sibling.shape))


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down every tree for as long as a child holds the token that the target would choose."""
    trees, most = accept_index.shape
    nodes = candidates.shape[1]
    tokens, index = candidates.tolist(), retrive_index.tolist()
    chosen = target_predict.reshape(trees, nodes).tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for tree in range(trees):
        path = [0]
        while len(path) < most:
            child = first_child[tree][path[-1]]
            while child >= 0 and tokens[tree][child] != chosen[tree][path[-1]]:
                child = next_sibling[tree][child]
            if child < 0:
                break
            path.append(child)
        for step, node in enumerate(path):
            accept_index[tree, step] = index[tree][node]
            predicts[index[tree][node]] = chosen[tree][node]
        accept_token_num[tree] = len(path) - 1
