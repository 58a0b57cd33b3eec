"""An agent of Harbor's: it asks its model once, and runs the answer as a script."""

import tempfile

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


class OneCommand(BaseAgent):
    """Leaves the script as command.sh in the task's working directory."""

    @staticmethod
    def name() -> str:
        """Returns the name in Harbor's results."""
        return "one-command"

    def version(self) -> str:
        """Returns the version in Harbor's results."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Needs nothing in the environment."""

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        """Asks, uploads the answer, and runs it."""
        client = AsyncOpenAI(
            base_url=self.extra_env["OPENAI_BASE_URL"],
            api_key=self.extra_env["OPENAI_API_KEY"],
            http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
        )
        async with client:
            answer = await client.chat.completions.create(
                model=self.model_name, messages=[{"role": "user", "content": instruction}]
            )
        workdir = (await environment.exec("pwd")).stdout.strip()
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
            script.write(answer.choices[0].message.content or "")
            script.flush()
            await environment.upload_file(script.name, f"{workdir}/command.sh")
        await environment.exec("bash command.sh", timeout_sec=30)
