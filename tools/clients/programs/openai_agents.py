import asyncio

import agents
from common import KEY, MODE, MODEL, TEXT, URL, replace, say, show
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        tools = [agents.function_tool(replace)]
        agent = agents.Agent("agent", model=kind(MODEL, client), tools=tools)
        if MODE == "stream":
            events = agents.Runner.run_streamed(agent, TEXT).stream_events()
            pieces = [event.data async for event in events if event.type == "raw_response_event"]
            show(piece.delta for piece in pieces if piece.type == "response.output_text.delta")
        else:
            say((await agents.Runner.run(agent, TEXT)).final_output)


asyncio.run(main())
