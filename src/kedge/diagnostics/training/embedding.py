"""A t-SNE map of global and local features in one plane, as in Figure 2 of FedBR (2023)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MAX_POINTS = 400  # of all features together
PERPLEXITY = 30.0
SEED = 0


def embed(features: Tensor, seed: int = SEED) -> Tensor:
    """Places of features ``[n, p]`` in a plane, ``[n, 2]``, by t-SNE; it depends on the seed alone.

    Distances between far groups have no meaning, and neither have the axes.

    Raises:
        ValueError: there are fewer than 4 samples, or more than ``MAX_POINTS``.
    """
    from sklearn.manifold import TSNE

    if not 4 <= len(features) <= MAX_POINTS:
        raise ValueError(f"t-SNE of {len(features)} samples; give 4 to {MAX_POINTS}")
    rows = features.detach().reshape(len(features), -1).double().cpu().numpy()
    if not np.ptp(rows, axis=0).any():
        return torch.zeros(len(rows), 2, dtype=torch.float64)  # all in one place
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    model = TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=500, n_jobs=1)
    return torch.from_numpy(model.fit_transform(rows).astype(np.float64))
