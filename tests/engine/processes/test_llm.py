"""The offline API on tiny-kjv (real weights, CPU) and on the simulated device."""

import json
import os
from pathlib import Path

import pytest

from kvern_engine import LLM, SamplingParams

os.environ.setdefault("OMP_NUM_THREADS", "1")
TINY = str(Path(__file__).parents[1] / "models_data/tiny-kjv")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, device="cpu", max_model_len=256, kv_cache_memory_bytes=1 << 22) as engine:
        yield engine


def test_prompts_of_every_kind_give_the_same_answer(llm):
    text = "In the beginning God"
    ids = llm.get_tokenizer().encode(text)
    kinds = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    (first, *others) = [llm.generate(kind, GREEDY, use_tqdm=False)[0] for kind in kinds]
    assert first.prompt == text and first.prompt_token_ids == ids
    assert len(first.outputs[0].token_ids) == 16 and first.outputs[0].finish_reason == "length"
    assert first.outputs[0].text == llm.get_tokenizer().decode(first.outputs[0].token_ids)
    assert all(other.outputs[0].token_ids == first.outputs[0].token_ids for other in others)


def test_a_batch_comes_back_in_order_each_with_its_own_parameters(llm, capsys):
    prompts = ["And God said", "The LORD", "Blessed are", "And it came to pass"]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 9, 5, 7)]
    together = llm.generate(prompts, params)
    assert [r.prompt for r in together] == prompts
    assert [len(r.outputs[0].token_ids) for r in together] == [3, 9, 5, 7]
    alone = [llm.generate(p, q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]
    assert "4/4" in capsys.readouterr().err


def test_the_eos_that_the_tokenizer_names_ends_an_answer(tmp_path):
    """As in many models that were tuned for chats, whose config.json still has the EOS of what they were made from."""
    for file in Path(TINY).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    word, eos = next((t, i) for t, i in vocabulary.items() if t.isascii() and t.isalpha() and len(t) > 2)
    names = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": word}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with LLM(str(tmp_path), device="cpu", max_model_len=256, kv_cache_memory_bytes=1 << 22) as tuned:
        assert tuned.model_config.eos_token_ids == (0,) and tuned.get_tokenizer().eos_token_ids == (0, eos)
        for ignore, length, reason in ((False, 1, "stop"), (True, 5, "length")):
            params = SamplingParams(max_tokens=5, logit_bias={eos: 100.0}, ignore_eos=ignore)
            (answer,) = tuned.generate("The", params, use_tqdm=False)[0].outputs
            assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (length, reason, None)
        assert answer.text == word * 5


def test_stop_strings_cut_text_and_tokens(llm):
    (full,) = llm.generate("In the beginning", SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    text = full.outputs[0].text
    stop = text[10:14]
    (cut,) = llm.generate("In the beginning", SamplingParams(temperature=0.0, max_tokens=40, stop=stop), use_tqdm=False)
    answer = cut.outputs[0]
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == full.outputs[0].token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) < 40
    assert llm.core.idle


def test_a_choice_at_its_stop_string_is_not_computed_on(llm):
    sampled = {"n": 3, "seed": 1, "ignore_eos": True, "max_tokens": 40}
    (full,) = llm.generate("And God", SamplingParams(**sampled), use_tqdm=False)
    texts = [output.text for output in full.outputs]
    stop = next(
        piece for i in range(4, 40) if not any((piece := texts[1][i : i + 4]) in t for t in (texts[0], texts[2]))
    )
    before = llm.core.stats().step_tokens
    (cut,) = llm.generate("And God", SamplingParams(stop=stop, **sampled), use_tqdm=False)
    computed = llm.core.stats().step_tokens - before
    assert [output.finish_reason for output in cut.outputs] == ["length", "stop", "length"]
    assert [o.text for o in cut.outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    generated = sum(len(output.token_ids) for output in cut.outputs)
    # Each choice computes the last prompt token and all of its own but the last; one may run on for two steps.
    assert computed <= len(cut.prompt_token_ids) + generated + 2, (computed, generated)


def test_n_and_logprobs(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    (result,) = llm.generate("And God", params, use_tqdm=False)
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in result.outputs}) > 1
    for output in result.outputs:
        assert len(output.logprobs) == 6
        chosen = [output.logprobs[i][token].logprob for i, token in enumerate(output.token_ids)]
        assert output.cumulative_logprob == pytest.approx(sum(chosen))
        assert all(2 <= len(position) <= 3 for position in output.logprobs)
    again = llm.generate("And God", params, use_tqdm=False)[0]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in result.outputs]


def test_detokenize_false_gives_ids_only(llm):
    (result,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), False)
    assert result.outputs[0].text == "" and len(result.outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="stop must be empty where detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


def test_a_stream_is_the_text_in_pieces_and_may_be_left_early(llm):
    (whole,) = llm.generate("In the beginning", GREEDY, use_tqdm=False)
    pieces = list(llm.stream("In the beginning", GREEDY))
    assert len(pieces) > 3 and "".join(pieces) == whole.outputs[0].text
    for _ in llm.stream("In the beginning", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert llm.core.idle and llm.core.stats().num_running == 0


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1, 2], [3] * 300], r"prompts\[1\] has 300 tokens: at most 255 leave room .* max_model_len 256"),
        ([[1, 2], []], r"prompts\[1\] is empty"),
        ([[1], [5000]], r"prompts\[1\] holds token id 5000: ids of this model go from 0 to 2047"),
        ([[1], {"text": "x"}], r"prompts\[1\] needs 'prompt' \(text\) or 'prompt_token_ids'"),
        (7, "prompts must be text, token ids, a dict or a list of these, got int"),
    ],
)
def test_wrong_prompts_are_named_before_anything_runs(llm, prompts, words):
    with pytest.raises(ValueError, match=words):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.core.idle


def test_wrong_arguments_are_named(llm):
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="unknown field 'max_modellen'; did you mean 'max_model_len'"):
        LLM(TINY, max_modellen=3)
    with pytest.raises(ValueError, match="--dtype: 'int8' is not one of"):
        LLM(TINY, dtype="int8")


def test_ctrl_c_ends_the_requests_and_leaves_a_usable_engine(llm, monkeypatch):
    steps = 0
    real_step = llm.core.step

    def step():
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        return real_step()

    monkeypatch.setattr(llm.core, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["And God"] * 3, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    stats = llm.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert len(llm.generate("And God", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_the_simulated_device_needs_no_torch_and_counts_its_tokens():
    with LLM(TINY, device="sim", sim_speed=20, num_gpu_blocks_override=512) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
        results = llm.generate([[i + 1, *range(10, 40)] for i in range(32)], params, use_tqdm=False)
    assert all(len(r.outputs[0].token_ids) == 20 for r in results)
    assert results[0].metrics.first_token_time >= results[0].metrics.first_scheduled_time
