"""The public names, pinned: adding or losing one is a decision."""

import kedge


def test_public_names() -> None:
    assert sorted(kedge.__all__) == sorted(
        [
            "SGD", "Adam", "Batch", "Claim", "Classification", "Federation", "KedgeError",
            "LocalWork", "Mean", "Method", "Model", "MultiLabel", "Out", "Part", "Regression",
            "Result", "Round", "Simulation", "Spec", "Stack", "Sum", "View", "Weights",
            "check_part", "compare", "fit", "load_model", "oracle", "parse", "register", "run",
            "sweep",
        ]
    )  # fmt: skip
    assert all(hasattr(kedge, name) for name in kedge.__all__)
