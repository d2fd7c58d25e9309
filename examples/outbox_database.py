"""An order and its message are in one transaction. The message is published only if the transaction commits."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine
from sqlalchemy.orm import Session

from qflow_client.broker import Broker
from qflow_client.sqlalchemy import Inbox, Outbox, OutboxRelay

metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("item", Text, nullable=False))
outbox, inbox = Outbox(metadata), Inbox(metadata)


def order(session: Session, item: str) -> None:
    session.execute(orders.insert(), {"item": item})
    outbox.add(session, item, routing_key="orders", ordering_key=item)


with Broker() as broker, tempfile.TemporaryDirectory() as folder:
    broker.declare_queue("orders")
    engine = create_engine(f"sqlite:///{Path(folder) / 'shop.db'}")
    metadata.create_all(engine)

    with OutboxRelay(engine, broker.url, outbox=outbox):
        with Session(engine) as session:
            order(session, "a book")
            session.commit()
            order(session, "a second thought")
            session.rollback()
            order(session, "a lamp")
            session.commit()
        broker.wait_until(lambda broker: len(broker.messages("orders")) == 2)
    print("published:", [message.body.decode() for message in broker.messages("orders")])

    with Session(engine) as session:
        for message in (*broker.messages("orders"), *broker.messages("orders")):
            is_first = inbox.first_time(session, str(message.properties.message_id))
            print(message.body.decode(), "is handled" if is_first else "came twice, and is not handled again")
        session.commit()
        print("left in the outbox:", outbox.status(session).depth)
    engine.dispose()
