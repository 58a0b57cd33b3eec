from treadle.policy.backends.registry import describe
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO, MODELS
from treadle.trainer.preflight.describe import memory_line

BACKEND = describe("megatron")


def test_the_line_of_the_plan() -> None:
    config = load_config(
        [DEMO], ["rollout.prompt_length=300", "rollout.response_length=100"]
    ).config
    architecture = BACKEND.read_model(MODELS["demo:calculator"])
    line, _ = memory_line(config, BACKEND, architecture, 8)
    assert line.startswith("about ")
    assert "weights 3.68 MB, gradients 3.68 MB, optimizer 7.36 MB, 3200 tokens of" in line
    longer, _ = memory_line(config, BACKEND, architecture, 1000)
    assert f"{config.policy.micro_batch_tokens} tokens of a micro-batch" in longer


def test_the_line_says_what_offload_leaves_where() -> None:
    arguments = ["algorithm.kl_coef=0.1", "policy.offload.parameters=true"]
    config = load_config([DEMO], [*arguments, "policy.offload.optimizer=true"]).config
    architecture = BACKEND.read_model(MODELS["demo:calculator"])
    line, _ = memory_line(config, BACKEND, architecture, 8)
    assert line.endswith("; 3.68 MB between its phases, then 11 MB on the host")


def test_a_critic_keeps_a_second_model_with_its_optimizer() -> None:
    config = load_config([DEMO], ["algorithm.advantage=gae"]).config
    architecture = BACKEND.read_model(MODELS["demo:calculator"])
    assert "optimizer 7.36 MB, critic 14.7 MB, " in memory_line(config, BACKEND, architecture, 8)[0]
