"""Communication between ranks: Communicator, its two implementations, exact byte counts, phase clock."""

from gnnpar.comm.clock import PhaseClock
from gnnpar.comm.communicator import Communicator, Mesh, MessageTag, Pending
from gnnpar.comm.exchange import CodedExchange, Posted
from gnnpar.comm.ledger import EpochTraffic, Ledger
from gnnpar.comm.rows import Incoming, Outgoing, RowLike, RowLists, Wire
from gnnpar.comm.threads import ThreadWorld

__all__ = [
    "CodedExchange",
    "Communicator",
    "EpochTraffic",
    "Incoming",
    "Ledger",
    "Mesh",
    "MessageTag",
    "Outgoing",
    "Pending",
    "PhaseClock",
    "Posted",
    "RowLike",
    "RowLists",
    "ThreadWorld",
    "Wire",
]
