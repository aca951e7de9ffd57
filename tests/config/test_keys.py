from jaxdist.config.keys import keys, sections


def test_every_key_says_what_it_means() -> None:
    assert [key.path for key in keys().values() if not key.meaning] == []


def test_names_of_options() -> None:
    assert keys()["output_dir"].option == "--output-dir"
    assert keys()["train.global_batch_size"].option == "--train.global_batch_size"


def test_types_in_words() -> None:
    kinds = {path: keys()[path].kind for path in ("train.steps", "eval.every", "data.sources")}
    assert kinds == {
        "train.steps": "a whole number (int)",
        "eval.every": "a whole number (int) or null",
        "data.sources": "paths, or mappings of path and options",
    }
    assert keys()["parallel.skip_bubbles"].is_flag and not keys()["train.steps"].is_flag


def test_sections_in_order() -> None:
    assert list(sections())[:4] == ["model", "parallel", "precision", "optimizer"]
