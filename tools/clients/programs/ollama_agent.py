from common import MESSAGES, MODE, MODEL, URL, replace, say, show
from langchain.agents import create_agent
from langchain_ollama import ChatOllama

agent = create_agent(ChatOllama(model=MODEL, base_url=URL), [replace])
if MODE == "stream":
    parts = agent.stream({"messages": MESSAGES}, stream_mode="messages")
    show(part.content for part, _ in parts)
else:
    say(agent.invoke({"messages": MESSAGES})["messages"][-1].content)
