"""Writes what a model of `transformers` computes to a file that `infernum diff --against` reads.

    python dump_hidden.py MODEL out.safetensors --prompt "The capital of France is"
    python dump_hidden.py MODEL out.safetensors --tokens 1,5,9

Needs torch, transformers and safetensors. MODEL is a folder (or a name that transformers can fetch). Tensors in
the file, all float32 but the tokens, without the axis of the batch:

    tokens             i32 [T]
    embed              [T, hidden], what the first layer is given
    layers.I           [T, hidden], what layer I gives
    logits             [T, vocabulary]
    layers.I/PATH      what the module at PATH within layer I gives, such as layers.0/self_attn.q_proj
    layers.I/PATH<     what it is given first
    layers.I:OP.N      what the N-th call of a function gives: `rope` (queries and keys after the rotation, [T, heads,
                       dim]) and `softmax` (probabilities of attention, [heads, T, T])
    embed/PATH, head/PATH  the same of modules before and after the layers

`--no-inner` leaves out everything below `logits`; a prompt of a few dozen tokens is enough.
"""

import argparse
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def first_tensor(value):
    """The tensor, or the first one of a tuple."""
    if isinstance(value, torch.Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((v for v in values if isinstance(v, torch.Tensor)), None)


def layers_of(model, config):
    """The list of the decoder's layers: the first list of modules that is as long as the config says."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            return name, module
    sys.exit(f"expected a list of {config.num_hidden_layers} modules, the layers; found none")


class Dump:
    """Collects tensors while the model runs."""

    def __init__(self, tokens):
        self.tensors = {"tokens": torch.tensor(tokens, dtype=torch.int32)}
        self.count = len(tokens)
        self.stage = "embed"
        self.calls = 0  # of layers

    def keep(self, name, value):
        """Keeps a tensor [1, T, ..] or [T, ..] as [T, ..], and one [1, H, T, T] as [H, T, T]."""
        if value is None or not value.is_floating_point() or name in self.tensors:
            return
        value = value.detach()
        if value.dim() > 1 and value.shape[0] == 1:
            value = value[0]
        if value.numel() and value.dim() > 0:
            self.tensors[name] = value.to(torch.float32).contiguous().clone()

    def called(self, op, value):
        """Keeps what the next call of `op` in this stage gives."""
        n = 0
        while f"{self.stage}:{op}.{n}" in self.tensors:
            n += 1
        self.keep(f"{self.stage}:{op}.{n}", value)

    def watch_stage(self, layer, last):
        def before(_, args, kwargs):
            # By calls, as models that loop run a layer several times.
            self.stage = f"layers.{self.calls}"
            self.calls += 1
            if self.calls == 1:
                self.keep("embed", first_tensor(args) if args else first_tensor(kwargs))

        def after(_, args, output):
            self.keep(self.stage, first_tensor(output))
            if last:
                self.stage = "head"

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)

    def watch(self, module, path):
        def after(_, args, kwargs, output):
            self.keep(f"{self.stage}/{path}", first_tensor(output))
            given = first_tensor(args) if args else kwargs.get("hidden_states", kwargs.get("x"))
            self.keep(f"{self.stage}/{path}<", given)
            for value in output if isinstance(output, tuple) else ():
                square = isinstance(value, torch.Tensor) and value.dim() == 4
                if square and value.shape[-2:] == (self.count, self.count):
                    self.called("softmax", value)

        module.register_forward_hook(after, with_kwargs=True)

    def watch_rotation(self, model):
        """Wraps the function that rotates queries and keys, where the model's file has one of the usual name."""
        file = sys.modules[type(model).__module__]
        rotate = getattr(file, "apply_rotary_pos_emb", None)
        if rotate is None:
            return

        def wrapped(*args, **kwargs):
            result = rotate(*args, **kwargs)
            for value in result if isinstance(result, tuple) else (result,):
                # [1, heads, T, dim] in nearly all of them.
                turned = value.dim() == 4 and value.shape[2] == self.count
                self.called("rope", value.transpose(1, 2) if turned else value)
            return result

        file.apply_rotary_pos_emb = wrapped


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog.")
    parser.add_argument("--tokens", help="ids separated by commas, instead of --prompt")
    parser.add_argument("--no-inner", action="store_true", help="what layers give and nothing within them")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()

    if args.tokens:
        tokens = [int(t) for t in args.tokens.split(",")]
    else:
        tokens = AutoTokenizer.from_pretrained(args.model)(args.prompt)["input_ids"]
    # Eager attention gives its probabilities; float32 leaves little but mistakes to be seen.
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager", trust_remote_code=args.trust_remote_code
    ).eval()
    place, layers = layers_of(model, model.config.get_text_config())

    dump = Dump(tokens)
    for i, layer in enumerate(layers):
        dump.watch_stage(layer, i + 1 == len(layers))
    if not args.no_inner:
        dump.watch_rotation(model)
        for path, module in model.named_modules():
            inside = path.removeprefix(place + ".")
            if inside != path:
                inside = inside.partition(".")[2]  # without the layer's number
            elif path == "" or path == place or place.startswith(path + "."):
                continue  # what holds the layers
            if inside:
                dump.watch(module, inside)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits
    dump.keep("logits", logits)
    save_file(dump.tensors, args.out)
    print(f"{args.out}: {len(dump.tensors)} tensors of {len(tokens)} tokens")


if __name__ == "__main__":
    main()
