"""The parts of the minimal trainer that need no rank: settings, presets, tokens, sampling, the record."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from scipy import stats

import equipoise as eq
from equipoise.errors import InvalidConfig
from examples.minimal.record import FILE, Record, claim, read
from examples.minimal.sampling import GenerateSampler, RowNoise
from examples.minimal.settings import CONF, Settings
from examples.minimal.task import END, PROMPT_TOKENS, SETTINGS, Task, decode, encode, tiny_model


def composed(name: str, *overrides: str) -> Any:
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose(name, overrides=list(overrides))


@pytest.mark.parametrize("preset", sorted(path.stem for path in Path(CONF).glob("*.yaml")))
def test_every_preset_makes_settings(preset: str) -> None:
    assert isinstance(Settings.of(composed(preset)), Settings)


def test_the_default_preset_is_the_dataclass_but_for_the_folder() -> None:
    assert Settings.of(composed("minimal", "out=outputs/minimal")) == Settings()


def test_values_of_another_type_and_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigCompositionException, match="Error merging override dp=two"):
        composed("minimal", "dp=two")
    with pytest.raises(ConfigCompositionException, match="Could not override 'nodes'"):
        composed("minimal", "nodes=2")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dp": 0}, "dp must be at least 1, got 0"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"engine": "fsdp"}, r"engine must be one of \['ddp', 'fsdp2'\], got 'fsdp'; did you mean 'fsdp2'"),
        ({"algorithm": "reinforce"}, "algorithm must be one of"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"rollouts": 1}, "rollouts must be at least 2 with algorithm=grpo, got 1"),
        ({"sp": 3}, r"sp must divide the model's 4 heads, got 3; legal values: \[1, 2, 4\]"),
        ({"prompts": 3, "rollouts": 2, "mini_batches": 4}, r"mini_batches must divide .* = 6, got 4; .*\[1, 2, 3, 6\]"),
        (
            {"prompts": 1, "rollouts": 2, "mini_batches": 2, "dp": 4},
            "dp must be at most the 1 rows of an optimizer step, got 4",
        ),
        ({"max_token_len_per_gpu": 30, "sp": 2}, "max_token_len_per_gpu must be at least 31, to hold the longest row"),
    ],
)
def test_settings_that_cannot_work_name_what_is_legal(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidConfig, match=text):
        Settings(**wrong)


def test_the_number_of_processes_must_be_that_of_the_settings() -> None:
    Settings(dp=2, sp=2).check_world(4)
    with pytest.raises(InvalidConfig, match=r"dp · sp.*\b3\b.*got 4"):
        Settings(dp=2, sp=2).check_world(3)


def test_a_folder_is_kept_to_the_settings_that_move_numbers(tmp_path: Path) -> None:
    claim(tmp_path, Settings())
    claim(tmp_path, Settings(engine="ddp", dp=4, steps=7))
    with pytest.raises(InvalidConfig, match=r"lr.*\b0\b.*got 1\.0"):
        claim(tmp_path, Settings(lr=1.0))
    assert set(asdict(Settings())) == set(OmegaConf.to_container(composed("quick"), resolve=True) or ())


def test_the_longest_prompt_is_as_long_as_the_settings_take_it_to_be() -> None:
    task = Task(0)
    prompts = [task.prompt(number) for number in range(300)]
    assert max(map(len, prompts)) == PROMPT_TOKENS
    assert max(len(task.answer(number)) for number in range(300)) == SETTINGS["max_word_len"] + 1
    assert task.prompt(7) == Task(0).prompt(7) != Task(1).prompt(7)


def test_responses_are_scored_by_the_task() -> None:
    task = Task(0)
    right = task.answer(5)
    assert decode(task.prompt(5)).strip().endswith(decode(right)[::-1])
    assert task.score(5, right) == 1.0
    assert 0 < task.score(5, [right[0], *encode("?" * (len(right) - 2)), END]) < 1
    assert task.score(5, right[:-1]) == 0.0  # it does not end
    assert task.score(5, []) == 0.0


def test_row_noise_draws_from_the_softmax() -> None:
    scores = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).repeat(4000, 1)
    drawn = RowNoise(range(4000))(None, scores).argmax(-1)
    expected = 4000 * scores[0].double().softmax(-1)
    assert stats.chisquare(torch.bincount(drawn, minlength=4).tolist(), expected.tolist()).pvalue > 1e-3


def test_what_a_row_samples_does_not_depend_on_its_company() -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    sampler = GenerateSampler(LlamaForCausalLM(tiny_model()).double(), max_new_tokens=6)
    prompts = [encode("ab"), encode("a longer prompt\n"), encode("abc"), encode("ab")]
    seeds = [5, 6, 7, 8]
    together = sampler.sample(prompts, seeds)
    assert [sampler.sample([prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)] == together
    assert together[0] != together[3]  # one prompt, two seeds
    assert all(1 <= len(row) <= 6 and END not in row[:-1] for row in together)
    assert sampler.sample([], []) == []


def test_the_record_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    record = Record(tmp_path, writes=True)
    for phase, step in (("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3)):
        record.add(phase, step, 3, {"reward": 0.5}, seconds=0.1)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"phase": "rl", "st')
    Record(tmp_path, writes=False).back_to("sft", 0)
    assert len(read(tmp_path)) == 5
    record.back_to("rl", 2)
    assert [(line["phase"], line["step"]) for line in read(tmp_path)] == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2)]
    assert (tmp_path / FILE).read_text().endswith("}\n")
    record.back_to("sft", 0)
    assert read(tmp_path) == []


def test_errors_of_settings_are_the_packages_own() -> None:
    assert issubclass(InvalidConfig, eq.EquipoiseError)
