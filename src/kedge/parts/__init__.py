"""All built-in parts, one family of papers per file. Importing this package registers them."""

from kedge.parts.aggregation import FedAvgM, FedNova
from kedge.parts.contrastive import MOON
from kedge.parts.mixing import Mixup
from kedge.parts.personal import FedRep
from kedge.parts.proximal import FedDyn, FedProx
from kedge.parts.sharpness import FedSAM
from kedge.parts.variates import SCAFFOLD

__all__ = [
    "MOON",
    "SCAFFOLD",
    "FedAvgM",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedSAM",
    "Mixup",
]
