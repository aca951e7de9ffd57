"""The least that a layer must send over tp, in bytes of one member a microbatch (see `traffic.py`).

Over tp (arXiv 1909.08053): four all-reduces of A a layer and microbatch. Where the sequence is
sharded, each is a reduce-scatter and an all-gather, and two gathers come on top, whose results the
forward does not keep (arXiv 2205.05198). Remat makes the attention's sum again, unless o_proj is
saved. On TPUs XLA shards a stream that is left whole of its own accord, and gathers it where it is
needed: without sequence_parallel it sends twice the least (libtpu 0.0.42), with it the least.

Experts over tp (parallel/experts.py) stand where the MLP stands, and send the same. Each member
weighs the results of its own experts alone, so it has their part alone of the cotangents of a
token's K shares; the router that made them is whole on each member, so they are summed: one
all-reduce of [B, T, K] fp32 a layer and microbatch. Shared experts are added before the sum that
the others need, so they send nothing of their own. Where the sequence is sharded, a router scores
the tokens that its member has: the scores [B, T, E] are gathered, and the gradient of its weight
[D, E] is summed, both fp32.

Latent attention makes keys and values of latents, of joint width C, that are whole on each member
(so are queries, where they have a latent; nothing that tp shards is then made of the stream, whose
cotangent needs no sum). Each member has a part of the latents' cotangents: one all-reduce of
[B, T, C] a layer and microbatch. Where the sequence is sharded, so are they: they are gathered,
again on the way back, and their cotangents scattered, and the gradients of the weights [D, C] that
made them, each of its own tokens, are summed.

Of kv heads fewer than tp, of width H, each member holds the weights of all K, and tp/K members
attend with a copy of one head. On the way back the copies' cotangents are summed among the tp/K,
which is an all-reduce of [B, T, H], and as the weights are held by all, each gathers the others'
K - 1 sums: (K - 1 + 2 (g-1)/g) [B, T, H] for g = tp/K, for k and for v. A reduce-scatter and a
gather over all of tp would send as much. Summing gradients of the weights once a step instead would
send less where M B T is above 2 D, but each member would keep gradients of its own until then.
Where the sequence is sharded, these are summed too, each member's of its own tokens.
"""

from dataclasses import dataclass

from jaxdist.config import ModelConfig
from jaxdist.planner.flow import half

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """The layers of a model; all of them send alike.

    Attributes:
        tokens: Of a microbatch on one dp member, B T.
        width: Bytes of a number of the compute dtype on the wire.
        sharded_sequence: The stream between the blocks is sharded over tp.
    """

    model: ModelConfig
    remat: str
    tp: int
    tokens: int
    width: int
    sharded_sequence: bool

    def parts(self) -> dict[str, tuple[float, float, str]]:
        """Of attention and MLP: what forward and backward send, and the formula of both."""
        sequence = self.sharded_sequence
        # In halves of an all-reduce. A sharded sequence is gathered again on the way back.
        there, back = 2, 2 + sequence
        mlp = self._part(there, back, self._router_sums())
        sums = self._kv_sums()
        if self.model.kv_lora_rank:
            sums = self._latent_sums()
            if self.model.q_lora_rank:  # what tp shards is made of latents, none of it of x
                there, back = (1, 1) if sequence else (2, 0)
        saved = self.remat.replace(" ", "").split(",")
        if self.remat != "none" and "o_proj" not in saved and "dots" not in saved:
            back += 1 if sequence else 2
        return {"attention": self._part(there, back, sums), "mlp": mlp}

    def _part(
        self, there: int, back: int, own: tuple[float, float, str]
    ) -> tuple[float, float, str]:
        """So many halves of all-reduces of A, and what a part sends of its own."""
        once = self._once * self.tokens * self.model.hidden_size * self.width
        halves = there + back
        unit = f"{halves // 2 if halves % 2 == 0 else f'{halves}/2'} M L all-reduces of A"
        return there * once + own[0], back * once + own[1], unit + own[2]

    def _router_sums(self) -> tuple[float, float, str]:
        """Forward and backward of what routers make, with the words that the formula has for it."""
        model = self.model
        if not model.num_experts:
            return 0.0, 0.0, ""
        shares = 2 * self._once * self.tokens * model.num_experts_per_tok * _FP32
        if not self.sharded_sequence:
            return 0.0, shares, ", M L of [B, T, K]"
        logits = self._once * self.tokens * model.num_experts * _FP32
        words = ", M L of [B, T, K], 1/2 M L of [B, T, E], M L of [D, E]"
        return logits, shares + self._whole_gradient(model.num_experts), words

    def _latent_sums(self) -> tuple[float, float, str]:
        """The same of latent attention's narrow arrays [B, T, C]."""
        model = self.model
        latents = model.kv_lora_rank + model.qk_rope_head_dim + model.q_lora_rank
        once = self._once * self.tokens * latents * self.width
        if not self.sharded_sequence:
            return 0.0, 2 * once, ", M L of [B, T, C]"
        words = ", 3/2 M L of [B, T, C], M L of [D, C]"
        return once, 2 * once + self._whole_gradient(latents), words

    def _kv_sums(self) -> tuple[float, float, str]:
        """The same of k's and v's cotangents, where heads are fewer than tp."""
        model, heads = self.model, self.model.num_key_value_heads
        if heads % self.tp == 0:
            return 0.0, 0.0, ""
        head = self.tokens * model.head_dim * self.width
        sums = 2 * head * (heads - 1 + 2 * half(self.tp // heads))
        words = ", M L sums of dk, dv"
        if self.sharded_sequence:
            sums += self._whole_gradient(2 * heads * model.head_dim)
            words += " and their weights'"
        return 0.0, sums, words

    def _whole_gradient(self, columns: int) -> float:
        """Of summing the gradient of a weight [D, columns] that each member has whole.

        Where the sequence is sharded, each makes it of its own tokens.
        """
        return 2 * self._once * self.model.hidden_size * columns * _FP32

    @property
    def _once(self) -> float:
        """What a member sends of a payload in half an all-reduce."""
        return half(self.tp)
