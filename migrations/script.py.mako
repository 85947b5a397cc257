"""${message}: what changes, and why an older worker keeps working beside it.

Revision ${up_revision} follows ${down_revision}. Frozen once released.
"""

import sqlalchemy as sa
from alembic import op

revision = "${up_revision}"
down_revision = "${down_revision}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ${upgrades if upgrades else "raise NotImplementedError"}
