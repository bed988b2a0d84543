"""One thread: the tests are many small computations."""

import torch

torch.set_num_threads(1)
