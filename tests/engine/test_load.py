"""Loading: what is found, and what is refused by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_grpc.conformance.sampling_values import FEATURES
from pd_grpc.engine.base import Tokenizer
from pd_grpc.engine.load import ModelError, load_engine, load_tokenizer
from pd_grpc.engine.model_source import find_model
from pd_grpc.engine.sim_tokenizer import SimTokenizer
from pd_grpc.protocol.config import EngineConfig

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig

from tests.engine.torch_models import SIZES, load_tiny, save_model

IM_END = 2

pytestmark = pytest.mark.longest


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama", LlamaConfig(**SIZES))


def refusal(model: str | Path, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_engine(EngineConfig(model=str(model), **options))
    return caught.value


def test_the_sim_engine_and_its_tokenizer_load() -> None:
    engine = load_engine(EngineConfig(engine="sim", sim_vocab=500, num_blocks=4))
    tokenizer = load_tokenizer("sim", "anything", 500)

    assert engine.vocab_size == 500
    assert isinstance(tokenizer, SimTokenizer)


def test_importing_the_loader_imports_no_torch() -> None:
    code = "import sys, pd_grpc.engine.load; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_a_folder_loads_and_is_named_after_itself(llama: Path) -> None:
    stages: list[str] = []

    engine = load_engine(EngineConfig(model=str(llama), num_blocks=4), stages.append)

    assert engine.name == "tiny-llama"
    assert (engine.vocab_size, engine.max_model_len) == (300, 512)
    assert engine.features == {*FEATURES}
    assert stages[0] == "reading tiny-llama"
    assert stages[-1].startswith("making a pool of 4 blocks")


def test_max_model_len_may_be_less_than_the_models_own(llama: Path) -> None:
    assert load_tiny(llama, max_model_len=100).max_model_len == 100


def test_every_end_of_sequence_token_is_known(tmp_path: Path) -> None:
    folder = save_model(tmp_path, LlamaConfig(**{**SIZES, "eos_token_id": [5, 257]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))

    assert {5, 6, 257} <= load_tiny(folder).eos_token_ids


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "nowhere", "./nowhere", "nowhere.gguf"):
        error = refusal(missing)
        assert (error.field, error.message) == ("model", f"{missing} does not exist")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    error = refusal(tmp_path)

    assert str(error) == (f"model: {tmp_path} has no weights (looked for *.safetensors, *.gguf)")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    wrong_name, wrong_bytes = tmp_path / "model.bin", tmp_path / "model.gguf"
    wrong_name.write_bytes(b"x")
    wrong_bytes.write_bytes(b"not a model at all" * 10)

    assert "not a GGUF file" in refusal(wrong_name).message
    assert refusal(wrong_bytes).field == "model"


def test_a_folder_with_several_gguf_files_wants_one_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    assert "a.gguf, b.gguf" in refusal(tmp_path).message


def test_what_is_no_hub_name_is_refused() -> None:
    assert "neither a path nor a hub name" in refusal("a/b/c d").message


def test_a_folder_with_no_or_unknown_configuration_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert refusal(tmp_path).field == "model"

    for wrong in ({"model_type": "no-such-model"}, {"model_type": "llama", "vocab_size": "many"}):
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        assert refusal(tmp_path).field == "model"


def test_a_missing_or_misshapen_weight_is_refused_and_not_made_up(tmp_path: Path) -> None:
    folder = save_model(tmp_path, LlamaConfig(**SIZES))
    weights = load_file(folder / "model.safetensors")
    taken = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder).message

    weights["model.layers.1.mlp.up_proj.weight"] = taken[:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder).message


def test_a_weight_that_the_configuration_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, LlamaConfig(**SIZES, attention_bias=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))

    says = "12 weights that its configuration has no place for, the first is model.layers.0.self_"
    assert says in refusal(folder).message


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"chunk_tokens": 100}, "chunk_tokens", "not a multiple of block_size (16)"),
        ({"max_model_len": 513}, "max_model_len", "512"),
        ({"max_model_len": 400, "num_blocks": 24}, "num_blocks", "hold 384 tokens"),
        ({"device": "gpu"}, "device", "cpu, cuda or cuda:N"),
    ],
)
def test_sizes_and_devices_out_of_bounds_are_refused(
    llama: Path, options: dict[str, Any], field: str, says: str
) -> None:
    error = refusal(llama, **options)

    assert error.field == field
    assert says in error.message


def sliding_layers() -> Any:
    return Gemma2Config(**SIZES, head_dim=8, sliding_window=64)


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding window": (lambda: MistralConfig(**SIZES, sliding_window=64), "sliding window of 64"),
    "sliding layers": (sliding_layers, "sliding window of 64"),
    "softcap": (
        lambda: Gemma2Config(**SIZES, head_dim=8, layer_types=["full_attention"] * 3),
        "softcap",
    ),
    "dynamic rope": (
        lambda: LlamaConfig(
            **SIZES,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        "rope_type dynamic",
    ),
}


@pytest.mark.parametrize("kind", list(UNSUPPORTED))
def test_a_model_with_another_attention_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, says = UNSUPPORTED[kind]
    folder = save_model(tmp_path / "strange", make())

    error = refusal(folder, num_blocks=16)

    assert error.field == "model"
    assert "strange" in error.message and says in error.message


@pytest.mark.parametrize("kind", ["gpt_neo", "falcon", "xglm", "nemotron"])
def test_a_model_whose_attention_is_code_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    sizes = {**SIZES, "num_layers": 3, "attention_types": [[["global"], 3]], "num_heads": 6}
    folder = save_model(tmp_path / "own", AutoConfig.for_model(kind, **sizes))

    error = refusal(folder, num_blocks=16)

    assert error.field == "model"
    assert error.message.startswith("own is not supported: it")


def test_a_model_that_also_looks_ahead_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "own", AutoConfig.for_model("bert", **SIZES))

    assert "not causal" in refusal(folder, num_blocks=16).message


def test_weights_that_are_cut_off_are_refused(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    assert "cannot be loaded" in refusal(tmp_path).message


def test_learned_positions_and_heads_of_their_own_are_supported(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=48, n_layer=2, n_head=4, n_positions=128)

    engine = load_tiny(save_model(tmp_path, config))

    assert engine.max_model_len == 128
    assert engine.layout.groups[0].planes[0].heads == 4


@pytest.mark.model
@pytest.mark.usefixtures("packaged_model")
def test_smollm2_is_found_without_its_dependencies() -> None:
    source = find_model("smollm2")

    assert source.name == "SmolLM2-135M-Instruct"
    assert source.gguf is not None and (Path(source.location) / source.gguf).is_file()


@pytest.mark.model
def test_smollm2_ends_with_im_end_and_speaks_its_chat_template(
    smollm2: Any, smollm2_tokenizer: Tokenizer
) -> None:
    assert smollm2.eos_token_ids == {IM_END}
    assert smollm2_tokenizer.encode("<|im_end|>") == [IM_END]
    chat = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "12")]
    assert smollm2_tokenizer.encode_chat(chat) == smollm2_tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_smollm2_splits_numbers_into_digits_and_leaves_special_tokens_out_of_text(
    smollm2_tokenizer: Tokenizer,
) -> None:
    digits = smollm2_tokenizer.encode("2024")

    assert len(digits) == 4
    assert smollm2_tokenizer.decode([1, *digits, 0, IM_END]) == "2024"


@pytest.mark.model
@pytest.mark.usefixtures("packaged_model")
def test_the_quick_way_to_read_a_gguf_gives_what_transformers_gives() -> None:
    import gguf
    from transformers import AutoModelForCausalLM  # noqa: F401  registers the reader's module

    from pd_grpc.engine.gguf_reading import BufferReader, quick_gguf

    source = find_model("smollm2")
    path = Path(source.location) / str(source.gguf)
    ours, theirs = BufferReader(path), gguf.GGUFReader(path)

    assert ours.fields.keys() == theirs.fields.keys()
    for name, field in theirs.fields.items():
        assert ours.fields[name].data == field.data
        if len(field.data) < 100:
            assert ours.fields[name].contents() == field.contents()
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    assert all(
        (a.data == b.data).all()
        for a, b in zip(ours.tensors[::40], theirs.tensors[::40], strict=True)
    )
    original = gguf.GGUFReader
    with quick_gguf():
        assert gguf.GGUFReader(path) is gguf.GGUFReader(path)
    assert gguf.GGUFReader is original


def test_a_chat_without_a_template_or_without_messages_is_refused(llama: Path) -> None:
    tokenizer = load_tokenizer("torch", str(llama))

    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat([("user", "hi")])
    with pytest.raises(ValueError, match="at least one message"):
        tokenizer.encode_chat([])


def test_what_a_template_refuses_is_a_value_error(llama: Path, tmp_path: Path) -> None:
    for file in llama.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")

    tokenizer = load_tokenizer("torch", str(tmp_path))

    with pytest.raises(ValueError, match="roles must alternate"):
        tokenizer.encode_chat([("user", "hi")])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer("torch", str(tmp_path))


def test_the_tokenizer_may_be_used_from_many_threads(llama: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = load_tokenizer("torch", str(llama))
    texts = [f"text {i} " * (i % 7 + 1) for i in range(400)]

    with ThreadPoolExecutor(8) as pool:
        back = list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts))

    assert back == texts


@pytest.mark.model
@pytest.mark.usefixtures("packaged_model")
def test_a_local_model_is_loaded_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    load_tokenizer("torch", "smollm2").encode("hello")
    load_engine(EngineConfig(model="smollm2", num_blocks=4, threads=1))


@pytest.mark.parametrize("setting", [{"model": "/nowhere"}, {"device": "gpu"}])
def test_what_cannot_be_had_is_told_before_a_model_is_read(
    setting: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pd_grpc.engine.torch", None)
    with pytest.raises(ModelError):
        load_engine(EngineConfig(**{"engine": "torch", **setting}))


def test_a_hub_name_that_is_not_there_is_refused() -> None:
    code = """
from pd_grpc.engine.load import ModelError, load_engine
from pd_grpc.protocol.config import EngineConfig
try:
    load_engine(EngineConfig(model="nobody/no-such-model"))
except ModelError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        timeout=55,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )

    says = "model: nobody/no-such-model is not in the hub's cache, and HF_HUB_OFFLINE is set\n"
    assert done.stdout == says, done.stderr


def test_the_dtype_is_that_of_the_configuration(llama: Path) -> None:
    engine = load_tiny(llama, dtype="bfloat16")

    assert engine.layout.groups[0].planes[0].dtype == "bfloat16"
    assert torch.get_default_dtype() == torch.float32
