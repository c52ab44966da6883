"""Pure decisions on processes: a slot's state, what to start, kill and publish. No Ray, asyncio, clock or sockets."""
