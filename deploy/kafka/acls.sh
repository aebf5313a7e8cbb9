#!/bin/sh
# The least rights of Millrace on a Kafka cluster with an authorizer. Run once, as an administrator:
#
#   BOOTSTRAP=kafka-1:9093 PREFIX=shop WRITER=millrace READER=millrace-apply sh acls.sh
#
# COMMAND_CONFIG names the administrator's client properties, if any. WRITER runs capture, READER the sinks; where one
# process does both, one user may have both. No other user may write to topics of the prefix: see docs/kafka.md.
set -eu
: "${BOOTSTRAP:?}" "${PREFIX:?}" "${WRITER:?}" "${READER:?}"

allow() {
    kafka-acls.sh --bootstrap-server "$BOOTSTRAP" ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} --add --force "$@"
}

# Delete is needed for records that are past retention; topics are never deleted.
allow --allow-principal "User:$WRITER" --topic "$PREFIX." --resource-pattern-type prefixed \
    --operation Create --operation Describe --operation Read --operation Write --operation Delete
allow --allow-principal "User:$WRITER" --transactional-id "$PREFIX.millrace.writer" \
    --operation Describe --operation Write
# No group is joined, but librdkafka looks up the coordinator of one.
allow --allow-principal "User:$WRITER" --group "$PREFIX.millrace.reader" --operation Describe
# Only for log.retention_gb, which needs the sizes of topics.
allow --allow-principal "User:$WRITER" --cluster --operation Describe

allow --allow-principal "User:$READER" --topic "$PREFIX." --resource-pattern-type prefixed \
    --operation Describe --operation Read
allow --allow-principal "User:$READER" --group "$PREFIX.millrace.reader" --operation Describe
allow --allow-principal "User:$READER" --topic "$PREFIX.millrace.consumers" \
    --operation Describe --operation Write
