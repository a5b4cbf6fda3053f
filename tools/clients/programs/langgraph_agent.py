from common import KEY, MESSAGES, MODE, MODEL, URL, replace, say, show
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

agent = create_react_agent(ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY), [replace])
if MODE == "stream":
    parts = agent.stream({"messages": MESSAGES}, stream_mode="messages")
    show(part.content for part, _ in parts)
else:
    say(agent.invoke({"messages": MESSAGES})["messages"][-1].content)
