import treadle.trainer


def test_the_public_names_are_pinned() -> None:
    names = ["Config", "ConfigError", "LoadedConfig", "TrainingResult", "load_config", "train"]
    assert sorted(treadle.trainer.__all__) == names
    assert all(hasattr(treadle.trainer, name) for name in names)
