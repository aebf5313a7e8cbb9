#!/bin/bash
# Run once by the image, on an empty data folder: the shop's tables, then the role and the publication of Millrace.
set -euo pipefail
sql=${SQL:-/millrace}
tables='users, products, orders, order_items, page_views, logins'
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" -f "$sql/shop.sql"
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
	-v password="$MILLRACE_PASSWORD" -v tables="$tables" -f "$sql/role.sql"
