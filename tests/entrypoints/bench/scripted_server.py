"""A server that answers each request of a connection with the bytes it was given, whatever they are."""

import asyncio
import contextlib


@contextlib.asynccontextmanager
async def serving(*answers, tls=None):
    """Its port, and the list of requests that it fills in. An answer is bytes, or a list of pieces that are sent apart; an answer
    that ends with None closes the connection behind it. The last answer is given again and again."""
    requests, connections, talks = [], [], set()

    def connected(reader, writer):
        connections.append(writer)
        talks.add(asyncio.create_task(talk(len(connections), reader, writer)))

    async def talk(number, reader, writer):
        while head := await read_head(reader):
            length = int(dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2]).get(b"Content-Length", b"0"))
            requests.append((number, head.split(b"\r\n")[0], head, await reader.readexactly(length)))
            answer = answers[min(len(requests), len(answers)) - 1]
            for piece in [answer] if isinstance(answer, bytes) else answer:
                if piece is None:
                    writer.close()
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for _ in range(5):  # a client that has left already may still be on its way in
            await asyncio.sleep(0)
        for writer in connections:
            writer.close()
        await asyncio.gather(*talks, *(writer.wait_closed() for writer in connections), return_exceptions=True)


async def read_head(reader):
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def whole(body, status=b"200 OK", kind=b"text/event-stream"):
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def chunked(body, size):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
