"""POST /tokenize and /detokenize, as vLLM has them."""

from functools import partial

from jaxdist.server.aside import aside
from jaxdist.server.errors import APIError
from jaxdist.server.prompts import encode
from jaxdist.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxdist.server.responses import Text, Tokens
from jaxdist.server.service import Model, ServerOptions


async def tokenize(request: TokenizeRequest, model: Model, options: ServerOptions) -> Tokens:
    """Ids of a text, or of a chat's prompt."""
    if request.messages is not None:
        ids = await model.chat.prompt(
            request.messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            extra=request.chat_template_kwargs,
        )
    elif not request.prompt:
        ids = []
    else:
        special = request.add_special_tokens is not False
        ((_, ids),) = await encode(
            model,
            [request.prompt],
            "prompt",
            add_special_tokens=special,
            parse_special=options.parses_special(request),
        )
    tokens = Tokens(count=len(ids), max_model_len=model.max_model_len, tokens=ids)
    if request.return_token_strs:
        tokens.token_strs = await aside(len(ids), list, map(model.text_of.text, ids))
    return tokens


async def detokenize(request: DetokenizeRequest, model: Model) -> Text:
    """The text of ids, special tokens by their names."""
    if request.tokens and max(request.tokens) >= model.vocab_size:
        raise APIError(
            f"tokens: an id is outside of the vocabulary of {model.vocab_size}", param="tokens"
        )
    decode = partial(model.tokenizer.decode, skip_special_tokens=False)
    return Text(prompt=await aside(len(request.tokens), decode, request.tokens))
