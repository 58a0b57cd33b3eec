import record_verl_scripts


def test_the_arguments_of_each_call_are_recorded_as_verl_gets_them() -> None:
    script = """
set -xeuo pipefail
pip install verl && cd nowhere
n=${NNODES:-4}
for loss in a "b c"; do
  python3 -m verl.trainer.main_ppo --config-name=x trainer.nnodes=$n "loss=$loss" $@
done
ray job submit -- python3 -m verl.trainer.main_ppo data.x=[1,2] \\
    trainer.logger='["console"]'
"""
    assert record_verl_scripts.calls(script) == [
        ["--config-name=x", "trainer.nnodes=1", "loss=a"],
        ["--config-name=x", "trainer.nnodes=1", "loss=b c"],
        ["data.x=[1,2]", 'trainer.logger=["console"]'],
    ]
