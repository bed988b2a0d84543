"""Data: dataset readers, partitions, splits, augmentation, and the federation on a device."""
