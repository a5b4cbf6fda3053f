import asyncio

from common import KEY, MODE, MODEL, TEXT, URL, replace, say, show
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
agent = Agent(OpenAIChatModel(MODEL, provider=provider), tools=[replace])


async def stream() -> None:
    async with agent.run_stream(TEXT) as result:
        show([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


if MODE == "stream":
    asyncio.run(stream())
else:
    say(agent.run_sync(TEXT).output)
