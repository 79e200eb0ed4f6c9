"""Flags, environment and the words of their errors."""

import json
from pathlib import Path

import pytest

from kvern_engine import flags
from kvern_engine.config import EngineConfig
from kvern_engine.flags import FLAGS, FlagError, add_engine_flags, make_parser, parse_args

REPO = Path(__file__).parents[3]


def parse(*argv: str, **environ: str) -> EngineConfig:
    parser = make_parser("kvern serve", "test")
    add_engine_flags(parser)
    return parse_args(parser, argv, environ)[0]


def problems(*argv: str, **environ: str) -> list[str]:
    with pytest.raises(FlagError) as caught:
        parse(*argv, **environ)
    return caught.value.problems


def test_every_field_is_a_flag_and_an_environment_variable():
    values = {"integer": "2048", "number": "0.5", "string": "x", "list": "x"}
    for field, flag in FLAGS.items():
        if field in ("model", "admin_port", "trust_remote_code", "nnodes", "node_rank"):  # the last are for pods
            continue
        if flag.type == "boolean":
            assert getattr(parse("m", flag.option), field) is True
            assert getattr(parse("m", f"--no-{flag.name}"), field) is False
            assert getattr(parse("m", **{flag.env: "false"}), field) is False
            continue
        text = flag.choices[-1] if flag.choices else values[flag.type]
        if flag.type == "integer" and flag.maximum is not None and flag.maximum < 2048:
            text = str(int(min(flag.maximum, 64)))
        typed = getattr(parse("m", flag.option, text), field)
        assert typed == getattr(parse("m", **{flag.env: text}), field)
        assert typed in (text, [text], float(text) if flag.type in ("integer", "number") else None)


def test_a_pod_of_several_is_named_by_flags_or_environment():
    pods = {"KVERN_NNODES": "2", "KVERN_NODE_RANK": "1", "KVERN_MASTER_ADDR": "pod-0.group"}
    config = parse("m", "-tp", "2", **pods)
    assert (config.nnodes, config.node_rank, config.master_addr) == (2, 1, "pod-0.group")
    assert parse("m", "-tp", "2", "-n", "2", "-r", "1", "--master-addr", "pod-0.group") == config
    assert problems("m", "--node-rank", "1") == ["--node-rank must be within 0..0 (nnodes 1), got 1"]


def test_model_by_position_flag_or_environment():
    assert parse("m").model == parse("--model", "m").model == parse(KVERN_MODEL="m").model == "m"
    assert problems() == ["which model? Name one, for example: kvern serve builtin://smollm2-135m"]
    assert problems("a", "--model", "b") == ["two models are given: 'a' and --model 'b'"]
    assert "--api-key took all that follows it" in problems("--api-key", "secret", "m")[0]
    assert "secret" not in problems("--api-key", "secret", "m")[0]


def test_lists_repeat_or_take_several_and_commas_separate_them_in_the_environment():
    assert parse("m", "--served-model-name", "a", "b").served_model_name == ["a", "b"]
    assert parse("m", "--served-model-name", "a", "--served-model-name", "b").served_model_name == ["a", "b"]
    assert parse("m", KVERN_API_KEYS="a, b,").api_key == ["a", "b"]


def test_a_flag_beats_the_environment_and_spellings_are_forgiving():
    config = parse("m", "--max_model_len", "64", "--enable-prefix-caching=false", "-dp", "2", KVERN_MAX_MODEL_LEN="32")
    assert (config.max_model_len, config.enable_prefix_caching, config.data_parallel_size) == (64, False, 2)
    assert parse("m", KVERN_PORT="tcp://10.0.0.1:8000").port == 8000  # a Kubernetes service link


def test_numbers_as_vllm_takes_them():
    """k is a thousand, K is 1,024; auto and -1 are whatever fits; half and float are types."""
    for text, number in (("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6)):
        assert parse("m", "--max-model-len", text).max_model_len == number
        assert parse("m", KVERN_MAX_MODEL_LEN=text).asked_model_len == number
    assert parse("m", "--max-num-batched-tokens", "8K").max_num_batched_tokens == 8192
    assert parse("m", "--kv-cache-memory-bytes", "4G").kv_cache_memory_bytes == 4 << 30
    for text in ("auto", "-1"):
        config = parse("m", "--max-model-len", text)
        assert config.max_model_len == "auto" and config.asked_model_len is None
        assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig(model="m", max_model_len=-1).max_model_len == "auto"
    assert parse("m").max_model_len is None
    assert (parse("m", "--dtype", "half").dtype, parse("m", "--dtype", "float").dtype) == ("float16", "float32")
    assert parse("m", "--trust-remote-code").trust_remote_code, "accepted, and without effect"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-modellen", "4"], "unknown flag --max-modellen; did you mean --max-model-len?"),
        (["--zzzzzz"], "unknown flag --zzzzzz; --help lists all flags"),
        (["--swap-space", "4"], "--swap-space was removed: a preempted request is recomputed"),
        (["--swap-space=4"], "use --kv-cache-memory-bytes or --gpu-memory-utilization"),
        (["--cpu-offload-gb", "-4"], "--cpu-offload-gb: '-4' is not a number at least 0"),
        (["--speculative-config", "{}"], "--speculative-config: speculative decoding is not offered yet"),
        (["--enable-lora"], "--enable-lora: LoRA adapters are not offered yet"),
        (["--max-model-len", "0"], "--max-model-len: '0' is not a whole number at least 1"),
        (["--port", "99999"], "--port: '99999' is not a whole number from 0 to 65535"),
        (["--port", "abc"], "--port: 'abc' is not a whole number from 0 to 65535"),
        (["--gpu-memory-utilization", "1.5"], "'1.5' is not a number above 0 and at most 1"),
        (
            ["--max-model-len", "-2"],
            "--max-model-len: '-2' is not a whole number at least 1, perhaps with a suffix (8k:",
        ),
        (["--max-model-len", "8q"], "8,000, 8K: 8,192), or auto"),
        (["--max-model-len", "1.00001K"], "--max-model-len: '1.00001K' is not a whole number at least 1"),
        (["--max-num-batched-tokens", "auto"], "'auto' is not a whole number at least 1, perhaps with a suffix"),
        (["--dtype", "fp16"], "'fp16' is not one of auto, half, float16, bfloat16, float, float32 (use float16)"),
        (["--quantization", "awq"], "--quantization: 'awq' is not one of fp8"),
        (["--quantization", "awq"], "(awq is not offered yet)"),
        (["--quantization", "compressed-tensors"], "(a checkpoint in FP8 is recognized by itself: leave the flag out)"),
        (["--kv-cache-dtype", "fp8_e5m2"], "'fp8_e5m2' is not one of auto, fp8, fp8_e4m3 (use fp8, which is E4M3)"),
        (["--block-size", "24"], "--block-size must be a power of two, got 24"),
        (["--admin-port", "9000"], "--admin-port needs --admin-token-file"),
        (["--port"], "--port: expected one argument"),
        (["--enable-prefix-caching=maybe"], "--enable-prefix-caching: 'maybe' is neither true nor false"),
        (["another"], "what is this? another"),
    ],
)
def test_errors_name_the_flag_the_value_and_what_would_be_right(argv, words):
    (problem,) = problems("m", *argv)
    assert words in problem


def test_every_problem_gets_a_line_and_the_environment_is_named():
    assert len(problems("m", "--port", "x", "--max-model-len", "0")) == 2
    (problem,) = problems("m", KVERN_MAX_NUM_SEQS="many")
    assert problem == "KVERN_MAX_NUM_SEQS (--max-num-seqs): 'many' is not a whole number from 1 to 4096"


def test_help_groups_the_flags_and_names_their_variables(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for words in ("Memory:", "--max-model-len N", "[KVERN_MAX_MODEL_LEN]", "--no-enable-prefix-caching"):
        assert words in text


def test_the_operators_list_of_flags_is_fresh():
    path = REPO / "operator/kvern_operator/api/engine_flags.json"
    assert path.read_text() == flags.flags_json(), f"run: python -m kvern_engine.flags > {path.relative_to(REPO)}"
    listed = {entry["field"] for entry in json.loads(path.read_text())["flags"]}
    assert listed == set(EngineConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("KVERN_MAX_MODEL_LENGTH", "_LENGTH is set, and nothing reads it; did you mean KVERN_MAX_MODEL_LEN?"),
        ("KVERN_API_KEY", "did you mean KVERN_API_KEYS?"),
        ("KVERN_LOGLEVEL", "did you mean KVERN_LOG_LEVEL?"),
        ("KVERN_ADMN_PORT", "did you mean KVERN_ADMIN_PORT?"),
        ("KVERN_XYZZY", "nothing reads it; --help names the variable of every flag"),
    ],
)
def test_variables_that_nothing_reads_are_named_with_the_nearest(name, words):
    (problem,) = flags.unknown_variables({name: "secret-value", "PATH": "x", "KVERN": "x"})
    assert words in problem and "secret" not in problem


def test_variables_that_something_else_sets_are_let_alone():
    service_links = {
        "KVERN_SERVICE_HOST": "10.0.0.1",
        "KVERN_SERVICE_PORT": "8000",
        "KVERN_SERVICE_PORT_HTTP": "8000",
        "KVERN_PORT": "tcp://10.0.0.1:8000",
        "KVERN_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KVERN_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KVERN_CHAT_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "KVERN_CHAT_ROUTER_SERVICE_HOST": "10.0.0.1",
    }
    known = {flag.env: "x" for flag in FLAGS.values()} | {"KVERN_CACHE_DIR": "x", "KVERN_TEST_FULL": "1"}
    assert flags.unknown_variables(service_links | known) == []
