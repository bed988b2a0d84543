"""How heterogeneous the data of clients are: labels, sizes, features, duplicates."""

from kedge.diagnostics.data.sheet import diagnose_data as diagnose_data
