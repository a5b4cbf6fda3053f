import asyncio

from common import KEY, MODE, MODEL, TEXT, URL, replace, say, show
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
)


async def main():
    agent = FunctionAgent(tools=[replace], llm=llm)
    say(str(await agent.run(TEXT)))


if MODE == "stream":
    show(part.delta for part in llm.stream_complete(TEXT))
else:
    asyncio.run(main())
