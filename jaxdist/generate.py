"""`python -m jaxdist.generate`: write text with a trained model, whatever it lies in."""

import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields

from jsonargparse import ArgumentParser

from jaxdist.config import UsageError, one_line_errors


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    model: str = field(
        metadata={
            "help": "A training run's folder, a Hugging Face folder, a .gguf file or a hub name."
        }
    )
    prompt: str = field(metadata={"help": "Text to continue."})
    max_tokens: int = field(default=100, metadata={"help": "Most tokens to write."})
    temperature: float = field(
        default=0.8, metadata={"help": "0 takes the likeliest token; higher varies more."}
    )
    seed: int = field(default=0, metadata={"help": "The same seed writes the same text."})


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, restore, write the text as it comes; returns the exit code."""
    with one_line_errors():
        options = parse(sys.argv[1:] if argv is None else argv)
        try:
            for piece in write(options):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print()
            return 130
        print()
    return 0


def parse(argv: Sequence[str]) -> Options:
    """The options that the arguments spell."""
    parser = ArgumentParser(prog="jaxdist generate", exit_on_error=False, allow_abbrev=False)
    for option in fields(Options):
        parser.add_argument(
            _dashed("--" + option.name),
            type=option.type,
            default=None if option.default is MISSING else option.default,
            required=option.default is MISSING,
            help=option.metadata["help"],
        )
    try:
        return Options(**parser.parse_args(list(map(_dashed, argv))).as_dict())
    except ArgumentError as error:
        wrong = re.search(r'"(\w+)".*value: (.*)', str(error), re.DOTALL)
        message = f"{_dashed('--' + wrong[1])} cannot be {wrong[2]!r}" if wrong else str(error)
        raise UsageError(f"{message}; --help lists the options") from None


def _dashed(word: str) -> str:
    """An option's name with - for each _; any other word as it is."""
    return re.sub(r"^--\w+", lambda name: name[0].replace("_", "-"), word)


def write(options: Options) -> Iterator[str]:
    """The prompt, then its continuation in pieces; all is checked before the model is read."""
    # JAX is loaded here, after the arguments are known to be right.
    from jaxdist.data import load_tokenizer
    from jaxdist.inference.detokenizer import TextStream
    from jaxdist.inference.naive import Sampling, check_prompt, generate
    from jaxdist.training.model_source import open_model

    sampling = Sampling(
        max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
    )
    source = open_model(options.model)
    if source.tokenizer is None:
        raise UsageError(f"--model {options.model} has no tokenizer; put its tokenizer.json there")
    tokenizer = load_tokenizer(source.tokenizer)
    prompt = tokenizer.encode(options.prompt)
    if tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id, *prompt]
    check_prompt(source.config, prompt, sampling.max_tokens)
    model = source.model()
    yield options.prompt
    stream = TextStream(tokenizer, prompt)
    for token in generate(
        model, prompt, sampling, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size
    ):
        yield stream.push(token)
    yield stream.finish()


if __name__ == "__main__":
    sys.exit(main())
