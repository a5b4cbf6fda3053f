import os

from common import KEY, MODE, MODEL, TEXT, URL, replace, say, show
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

os.environ["OPENAI_API_KEY"] = KEY
pieces = []
chat = OpenAIChatGenerator(
    model=MODEL,
    api_base_url=f"{URL}/v1",
    streaming_callback=(lambda chunk: pieces.append(chunk.content)) if MODE == "stream" else None,
)
agent = Agent(chat_generator=chat, tools=[create_tool_from_function(replace)])
answer = agent.run(messages=[ChatMessage.from_user(TEXT)])["messages"][-1].text
if MODE == "stream":
    show(pieces)
else:
    say(answer)
