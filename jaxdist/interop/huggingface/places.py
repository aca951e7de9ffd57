"""Where the weights of a model lie in a Hugging Face folder, by the table of its family."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.config import ModelConfig
from jaxdist.interop.huggingface.family import Family
from jaxdist.interop.leaves import DENSE, leaf_shapes, stack_of


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our weights (or one layer of a stack) lies in a folder's tensors."""

    tensor: str  # `{layer}` stands for the layer's number, `{expert}` for an expert's
    start: int = 0  # outputs [start, stop) of the tensor
    stop: int
    outputs_first: bool = True  # the outputs are the tensor's first dim, else its last
    transposed: bool = False  # ours is [in, out], theirs [out, in]
    first_layer: int = 0  # the model's number of the stack's first layer
    num_layers: int = 0  # of the stack; 0 outside of stacks
    num_experts: int = 0  # each of which is a tensor; 0 where they are none

    def tensors(self, layer: int | None) -> list[str]:
        """The tensor, or those of all experts, for layer `layer` of the stack."""
        number = None if layer is None else self.first_layer + layer
        experts = range(self.num_experts) if self.num_experts else (None,)
        return [self.tensor.format(layer=number, expert=expert) for expert in experts]

    @property
    def layers(self) -> Sequence[int | None]:
        """The layers of the stack; (None,) outside of stacks."""
        return range(self.num_layers) if self.num_layers else (None,)


def places(family: Family, config: ModelConfig) -> dict[str, Place]:
    """Where each of our weights lies, by our names in the model's order."""
    shapes = leaf_shapes(config)
    homes = {
        ours: (theirs, together) for theirs, together in family.modules.items() for ours in together
    }
    found = {}
    for leaf, shape in shapes.items():
        if leaf in family.outside:
            found[leaf] = Place(tensor=family.outside[leaf], stop=shape[0])
            continue
        stack = stack_of(leaf)
        assert stack is not None
        name = leaf.removeprefix(stack)
        first = 0 if stack == DENSE else config.first_k_dense_replace
        if name in family.experts:
            found[leaf] = Place(
                tensor=family.layers + family.experts[name],
                stop=shape[-1],
                transposed=True,
                num_experts=shape[1],
                first_layer=first,
                num_layers=shape[0],
            )
            continue
        module, _, kind = name.rpartition("/")
        theirs, together = homes[module]
        outputs = [shapes[f"{stack}{other}/{kind}"][-1] for other in together]
        index = together.index(module)
        matrix = len(shape) == 3
        found[leaf] = Place(
            tensor=f"{family.layers}{theirs}.{kind}",
            start=sum(outputs[:index]),
            stop=sum(outputs[: index + 1]),
            outputs_first=family.by_outputs or not matrix,
            transposed=family.by_outputs and matrix,
            first_layer=first,
            num_layers=shape[0],
        )
    return found


def tensor_shapes(family: Family, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model: what is outside of the blocks, then layer by layer."""
    shapes = leaf_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for leaf, place in places(family, config).items():
        if not place.num_layers:
            found[place.tensor] = shapes[leaf]
            continue
        own: tuple[int, ...] = (place.stop,)  # of joined tensors the last has the whole height
        if len(shapes[leaf]) > 2:
            inputs = shapes[leaf][-2]
            own = (place.stop, inputs) if place.outputs_first else (inputs, place.stop)
        for layer in range(place.num_layers):
            block = blocks.setdefault(place.first_layer + layer, {})
            for tensor in place.tensors(layer):
                block[tensor] = max(block.get(tensor, own), own)
    for number in sorted(blocks):
        found |= blocks[number]
    return found
