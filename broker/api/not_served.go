package api

// What is not served, and why. A client that sends one of these regardless is cut
// off with a line in the log, as Kafka does with keys that it does not know; stock
// clients look at ApiVersions first and say which feature the broker lacks.
//
// Consumer groups (they come with a runtime for coordinators):
//
//	 8 OffsetCommit, 9 OffsetFetch   offsets of groups; also version 0, to the registry
//	10 FindCoordinator               no coordinators yet. While it is missing, clients that
//	                                 want transactions fail at once, which is what they
//	                                 should; and librdkafka, which infers lz4 from it,
//	                                 sends uncompressed what was to be compressed by lz4
//	11 JoinGroup, 12 Heartbeat, 13 LeaveGroup, 14 SyncGroup   classic groups
//	15 DescribeGroups, 16 ListGroups, 42 DeleteGroups, 47 OffsetDelete
//	68 ConsumerGroupHeartbeat, 69 ConsumerGroupDescribe       KIP-848 groups
//	76-79, 83-87, 90-92              share groups
//	88, 89, 93                       streams groups
//
// Transactions (they need the same runtime):
//
//	24 AddPartitionsToTxn, 25 AddOffsetsToTxn, 26 EndTxn, 27 WriteTxnMarkers,
//	28 TxnOffsetCommit, 61 DescribeProducers, 65 DescribeTransactions, 66 ListTransactions
//
// Administration (the command line writes to the registry itself):
//
//	19 CreateTopics, 20 DeleteTopics, 37 CreatePartitions     to come
//	32 DescribeConfigs, 33 AlterConfigs, 44 IncrementalAlterConfigs, 74 ListConfigResources
//	21 DeleteRecords, 34 AlterReplicaLogDirs, 35 DescribeLogDirs
//	60 DescribeCluster, 75 DescribeTopicPartitions            clients do with Metadata
//
// Replication (single-replica until it lands):
//
//	 4-7 LeaderAndIsr, StopReplica, UpdateMetadata, ControlledShutdown: gone from Kafka 4
//	23 OffsetForLeaderEpoch          clients skip its check where it is missing
//	43 ElectLeaders, 45 AlterPartitionReassignments, 46 ListPartitionReassignments
//
// Security (there is none yet; the daemon listens on loopback unless told otherwise):
//
//	17 SaslHandshake, 36 SaslAuthenticate, 29-31 ACLs, 38-41 delegation tokens,
//	48-51 quotas and SCRAM credentials
//
// Never: what KRaft's controllers say to each other (52-59, 62-64, 67, 70, 80-82,
// 94), since our controller is the registry; 71 and 72, client telemetry.
